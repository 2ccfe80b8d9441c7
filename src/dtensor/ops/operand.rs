//! [`Operand`]: an input of an operator, and where its caller wants it: its [`PlacementConstraint`].

use std::fmt;
use std::sync::Arc;

use burn::tensor::Float;
use itertools::Itertools;

use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec, Kind, RequiredPlacements};
use crate::placement::Placement;

/// A DTensor as an operator takes it: wherever is cheapest, or pinned to one placement.
#[derive(Debug)]
pub struct Operand<const D: usize, K: Kind = Float> {
    pub(super) tensor: DTensor<D, K>,
    pub(super) pin: Option<PlacementConstraint>,
}

/// Where a caller wants an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PlacementConstraint {
    /// On every mesh dimension.
    Every(Placement),
    /// On each; `None` leaves it to the rule.
    Each(Arc<[Option<Placement>]>),
}

impl PlacementConstraint {
    /// What is wanted on each dimension of a mesh.
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
                let each =
                    wanted.iter().map(|wanted| wanted.map_or("_".to_string(), |placement| placement.to_string()));
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
    /// This tensor, for an operator that brings it to `placement` on every mesh dimension, even where
    /// another row of its rule is cheaper: what a tensor-parallel style asks for. To `R` instead of a
    /// shard that would leave a rank without elements; `None` leaves the choice to the rule.
    ///
    /// Bringing it there is then one step with what the operator needs in backward: of a
    /// sequence-sharded activation that three projections read as `R`, one all-gather and one
    /// reduce-scatter for all three.
    pub fn constrained_to(self, placement: impl Into<Option<Placement>>) -> Operand<D, K> {
        Operand { tensor: self, pin: placement.into().map(PlacementConstraint::Every) }
    }

    /// [`constrained_to`](Self::constrained_to), to a placement for each mesh dimension.
    pub(crate) fn pinned_each(self, wanted: Option<&Arc<[Option<Placement>]>>) -> Operand<D, K> {
        Operand { tensor: self, pin: wanted.cloned().map(PlacementConstraint::Each) }
    }
}

impl<const D: usize, K: Kind> Operand<D, K> {
    /// The tensor where its pin wants it: for what is made of several operators, of which each reads it.
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

/// What a decision needs to know of an input.
#[derive(Debug, Clone, Copy)]
pub struct Arg<'a> {
    pub(super) spec: &'a Arc<DTensorSpec>,
    pub(super) pin: Option<&'a PlacementConstraint>,
}

impl<'a, const D: usize, K: Kind> From<&'a DTensor<D, K>> for Arg<'a> {
    fn from(tensor: &'a DTensor<D, K>) -> Self {
        Self { spec: tensor.spec(), pin: None }
    }
}

impl<'a, const D: usize, K: Kind> From<&'a Operand<D, K>> for Arg<'a> {
    fn from(operand: &'a Operand<D, K>) -> Self {
        Self { spec: operand.tensor.spec(), pin: operand.pin.as_ref() }
    }
}
