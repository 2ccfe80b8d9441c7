//! [`PartialGradGroups`]: groups over which tensor-parallel ranks sum partial gradients.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use itertools::Itertools;

use super::flags::{FlaggedGrads, without_unused};
use crate::Result;
use crate::comm::{Call, CommError, Communicator, ReduceOp};
use crate::dtensor::MeshDims;
use crate::mesh::DeviceMesh;

/// Name of the duplicated communicators on which backward issues its reductions. Their collectives
/// are ordered independently of those that forward issues.
pub(crate) const REDUCE: &str = "burn_dtensor::reduced";

/// The groups of a tensor-parallel mesh over which partial gradients are summed. Computations that
/// read a parameter may differ along some of the mesh dimensions. The parameter's gradient is then
/// summed over the ranks along these dimensions.
#[derive(Debug)]
pub(crate) struct PartialGradGroups {
    all: Communicator,
    /// One group for each non-empty set of mesh dimensions that have more than one rank.
    along: Vec<(MeshDims, Communicator)>,
}

impl PartialGradGroups {
    /// Creates the groups of `mesh`.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), and a failure of the world.
    pub(crate) fn of(mesh: &DeviceMesh) -> Result<Self> {
        let over = |dims: &[usize]| -> Result<_> {
            Ok(mesh.communicator_over(dims)?.duplicate_private(REDUCE))
        };
        let longer = (0..mesh.ndim()).filter(|&dim| mesh.size_of(dim) > 1);
        let along = longer.powerset().filter(|dims| !dims.is_empty());
        Ok(Self {
            all: over(&(0..mesh.ndim()).collect::<Vec<_>>())?,
            along: along
                .map(|dims| Ok((MeshDims::from_slice(&dims), over(&dims)?)))
                .collect::<Result<_>>()?,
        })
    }

    /// Returns the group of all ranks of the mesh.
    pub(crate) fn all(&self) -> &Communicator {
        &self.all
    }

    /// Returns the group of the ranks along `dims`, which must be in ascending order.
    pub(super) fn along(&self, dims: &[usize]) -> &Communicator {
        let known = self.along.iter().find(|(known, _)| **known == *dims);
        &known
            .expect("partial gradients differ only along mesh dimensions that have several ranks")
            .1
    }

    /// Sums this rank's partial gradients of these parameters over the ranks along the mesh
    /// dimensions `dims`.
    pub(super) fn sum(
        &self,
        dims: &[usize],
        call: Call,
        names: impl IntoIterator<Item = Arc<str>>,
        own: FlaggedGrads,
    ) -> Result<Vec<Option<DispatchTensor>>, CommError> {
        let flags = own.flags(1, ReduceOp::Sum);
        let mut sent = own.grads;
        sent.push(flags);
        // Model numbers are drawn on data-parallel groups and mean nothing on this one.
        let call = Call {
            model: None,
            ..call
        }
        .with_names(names);
        let mut sums = self
            .along(dims)
            .all_reduce(call, sent, ReduceOp::Sum)
            .wait()?;
        let flags = sums.pop().expect("the flags are the last tensor");
        Ok(without_unused(sums, flags, &own.used))
    }
}
