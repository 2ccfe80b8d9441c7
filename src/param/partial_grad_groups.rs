//! [`PartialGradGroups`]: the ranks over which terms of gradients are added up.

use itertools::Itertools;

use crate::Result;
use crate::comm::Communicator;
use crate::dtensor::MeshDims;
use crate::mesh::DeviceMesh;

/// The sequence of the reductions that backward makes: they wait for nothing that forward makes.
pub(crate) const REDUCE: &str = "reduced";

/// The groups of a tensor-parallel mesh. On one of several dimensions a parameter may be read for computations
/// that differ along some of these: its gradient is then summed over the ranks along them.
#[derive(Debug)]
pub(super) struct PartialGradGroups {
    all: Communicator,
    /// By mesh dimensions, of more than one rank each.
    along: Vec<(MeshDims, Communicator)>,
}

impl PartialGradGroups {
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), and a failure of the world.
    pub(super) fn of(mesh: &DeviceMesh) -> Result<Self> {
        let over = |dims: &[usize]| -> Result<_> { Ok(mesh.communicator_over(dims)?.duplicate(REDUCE)) };
        let longer = (0..mesh.ndim()).filter(|&dim| mesh.size_of(dim) > 1);
        let along = longer.powerset().filter(|dims| !dims.is_empty());
        Ok(Self {
            all: over(&(0..mesh.ndim()).collect::<Vec<_>>())?,
            along: along.map(|dims| Ok((MeshDims::from_slice(&dims), over(&dims)?))).collect::<Result<_>>()?,
        })
    }

    /// All ranks of the mesh.
    pub(super) fn all(&self) -> &Communicator {
        &self.all
    }

    /// The ranks along `dims`, ascending.
    pub(super) fn along(&self, dims: &[usize]) -> &Communicator {
        let known = self.along.iter().find(|(known, _)| **known == *dims);
        &known.expect("terms differ along dimensions of the mesh that have several ranks").1
    }
}
