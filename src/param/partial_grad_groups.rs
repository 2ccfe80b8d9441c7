//! [`PartialGradGroups`]: groups of tensor-parallel ranks over which partial gradients are summed.

use itertools::Itertools;

use crate::Result;
use crate::comm::Communicator;
use crate::dtensor::MeshDims;
use crate::mesh::DeviceMesh;

/// Name of the duplicated communicators on which backward issues its reductions. Their collectives are ordered
/// independently of those that forward issues.
pub(crate) const REDUCE: &str = "burn_dtensor::reduced";

/// The groups of a tensor-parallel mesh over which partial gradients are summed. Computations that read a parameter
/// may differ along some of the mesh dimensions. The parameter's gradient is then summed over the ranks along these
/// dimensions.
#[derive(Debug)]
pub(super) struct PartialGradGroups {
    all: Communicator,
    /// One group for each non-empty set of mesh dimensions that have more than one rank.
    along: Vec<(MeshDims, Communicator)>,
}

impl PartialGradGroups {
    /// Creates the groups of `mesh`.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), and a failure of the world.
    pub(super) fn of(mesh: &DeviceMesh) -> Result<Self> {
        let over = |dims: &[usize]| -> Result<_> { Ok(mesh.communicator_over(dims)?.duplicate_private(REDUCE)) };
        let longer = (0..mesh.ndim()).filter(|&dim| mesh.size_of(dim) > 1);
        let along = longer.powerset().filter(|dims| !dims.is_empty());
        Ok(Self {
            all: over(&(0..mesh.ndim()).collect::<Vec<_>>())?,
            along: along.map(|dims| Ok((MeshDims::from_slice(&dims), over(&dims)?))).collect::<Result<_>>()?,
        })
    }

    /// Returns the group of all ranks of the mesh.
    pub(super) fn all(&self) -> &Communicator {
        &self.all
    }

    /// Returns the group of the ranks along `dims`, which must be in ascending order.
    pub(super) fn along(&self, dims: &[usize]) -> &Communicator {
        let known = self.along.iter().find(|(known, _)| **known == *dims);
        &known.expect("partial gradients differ only along mesh dimensions that have several ranks").1
    }
}
