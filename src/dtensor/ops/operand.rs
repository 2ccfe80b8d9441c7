//! [`Operand`]: an input of an operator, with the placements that its caller requires (its
//! [`PlacementConstraint`]).

use std::fmt;
use std::sync::Arc;

use burn::tensor::Float;
use itertools::Itertools;

use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec, Kind, RequiredPlacements};
use crate::placement::Placement;

/// An input of an operator: a DTensor that the rule may place as is cheapest, or one that is
/// constrained to a placement.
#[derive(Debug)]
pub struct Operand<const D: usize, K: Kind = Float> {
    pub(super) tensor: DTensor<D, K>,
    pub(super) pin: Option<PlacementConstraint>,
}

/// Placements that a caller requires of an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PlacementConstraint {
    /// This placement on every mesh dimension.
    Every(Placement),
    /// A placement for each mesh dimension; `None` leaves the choice to the rule.
    Each(Arc<[Option<Placement>]>),
}

impl PlacementConstraint {
    /// Returns the required placement for each dimension of a mesh.
    pub(super) fn on(&self, mesh_dims: usize) -> RequiredPlacements {
        match self {
            Self::Every(placement) => (0..mesh_dims).map(|_| Some(*placement)).collect(),
            Self::Each(wanted) => wanted.as_ref().into(),
        }
    }
}

impl fmt::Display for PlacementConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Every(placement) => write!(f, "{placement}"),
            Self::Each(wanted) => {
                let each = wanted.iter().map(|wanted| {
                    wanted.map_or("_".to_string(), |placement| placement.to_string())
                });
                write!(f, "[{}]", each.format(", "))
            }
        }
    }
}

impl<const D: usize, K: Kind> From<DTensor<D, K>> for Operand<D, K> {
    fn from(tensor: DTensor<D, K>) -> Self {
        Self { tensor, pin: None }
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Constrains this tensor to `placement` on every mesh dimension when an operator takes it,
    /// even if another strategy of the operator's rule is cheaper. Tensor-parallel styles use it.
    /// If sharding would leave a rank without elements, `Replicate` is used instead; `None` leaves
    /// the choice to the rule.
    ///
    /// The redistribution includes what the operator needs in backward. If three projections read a
    /// sequence-sharded activation as `R`, one all-gather and one reduce-scatter serve all three.
    pub fn constrained_to(self, placement: impl Into<Option<Placement>>) -> Operand<D, K> {
        Operand {
            tensor: self,
            pin: placement.into().map(PlacementConstraint::Every),
        }
    }

    /// Like [`constrained_to`](Self::constrained_to), but with a placement for each mesh dimension.
    pub(crate) fn pinned_each(self, wanted: Option<&Arc<[Option<Placement>]>>) -> Operand<D, K> {
        Operand {
            tensor: self,
            pin: wanted.cloned().map(PlacementConstraint::Each),
        }
    }
}

impl<const D: usize, K: Kind> Operand<D, K> {
    /// Redistributes the tensor to its constraint. For a computation that consists of several
    /// operators which all read it.
    pub(super) fn placed(self) -> Result<DTensor<D, K>> {
        match self.pin {
            Some(pin) => {
                let wanted = pin.on(self.tensor.mesh().ndim());
                self.tensor.redistribute_each(&wanted)
            }
            None => Ok(self.tensor),
        }
    }
}

/// Spec and placement constraint of an input, from which a sharding is resolved.
#[derive(Debug, Clone, Copy)]
pub struct Arg<'a> {
    pub(super) spec: &'a Arc<DTensorSpec>,
    pub(super) pin: Option<&'a PlacementConstraint>,
}

impl<'a, const D: usize, K: Kind> From<&'a DTensor<D, K>> for Arg<'a> {
    fn from(tensor: &'a DTensor<D, K>) -> Self {
        Self {
            spec: tensor.spec(),
            pin: None,
        }
    }
}

impl<'a, const D: usize, K: Kind> From<&'a Operand<D, K>> for Arg<'a> {
    fn from(operand: &'a Operand<D, K>) -> Self {
        Self {
            spec: operand.tensor.spec(),
            pin: operand.pin.as_ref(),
        }
    }
}
