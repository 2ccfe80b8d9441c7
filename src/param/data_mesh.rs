//! [`FsdpMeshInfo`]: the mesh dimensions over which data parallelism shards and replicates a parameter.

use crate::Result;
use crate::comm::Communicator;
use crate::mesh::DeviceMesh;

/// A mesh with one dimension that shards, and optionally a second one that replicates (HSDP). Each may consist of
/// several flattened dimensions of the program's mesh.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct FsdpMeshInfo {
    pub(crate) mesh: DeviceMesh,
    /// Index of the dimension that shards.
    pub(crate) shard: usize,
}

impl FsdpMeshInfo {
    /// Returns the index of the dimension that replicates, if there is one.
    fn replicate(&self) -> Option<usize> {
        (self.mesh.ndim() == 2).then(|| 1 - self.shard)
    }

    /// Returns the name of the dimension that shards.
    pub(crate) fn shard_name(&self) -> &str {
        &self.mesh.names()[self.shard]
    }

    /// Returns the group of the ranks that shard.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember).
    pub(crate) fn shard_group(&self) -> Result<&Communicator> {
        self.mesh.communicator(self.shard)
    }

    /// Returns the group of the ranks that replicate, if there are any.
    ///
    /// # Errors
    /// Those of [`shard_group`](Self::shard_group).
    pub(crate) fn replicate_group(&self) -> Result<Option<&Communicator>> {
        self.replicate().map(|dim| self.mesh.communicator(dim)).transpose()
    }
}
