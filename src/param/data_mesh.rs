//! [`FsdpMeshInfo`]: the mesh dimensions that data parallelism cuts and replicates a parameter over.

use crate::Result;
use crate::comm::Communicator;
use crate::mesh::DeviceMesh;

/// A mesh of one dimension that shards, and beside it perhaps one that replicates (HSDP). Each may be several of the
/// program's mesh, flattened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct FsdpMeshInfo {
    pub(crate) mesh: DeviceMesh,
    /// The dimension that shards.
    pub(crate) shard: usize,
}

impl FsdpMeshInfo {
    /// The dimension that replicates, if there is one.
    fn replicate(&self) -> Option<usize> {
        (self.mesh.ndim() == 2).then(|| 1 - self.shard)
    }

    /// The name of the dimension that shards.
    pub(crate) fn shard_name(&self) -> &str {
        &self.mesh.names()[self.shard]
    }

    /// The ranks that shard.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember).
    pub(crate) fn shard_group(&self) -> Result<&Communicator> {
        self.mesh.communicator(self.shard)
    }

    /// The ranks that replicate, if any do.
    ///
    /// # Errors
    /// As [`shard_group`](Self::shard_group).
    pub(crate) fn replicate_group(&self) -> Result<Option<&Communicator>> {
        self.replicate().map(|dim| self.mesh.communicator(dim)).transpose()
    }
}
