//! [`FsdpMeshInfo`]: the mesh of a unit's shards and replicas. [`data_spec`] and [`combine`]: specs of parameters on it.

use burn::tensor::DType;

use super::ParamError;
use crate::Result;
use crate::comm::Communicator;
use crate::dtensor::DTensorSpec;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement, ShardSizes};

/// A mesh with one dimension that shards, and optionally a second one that replicates (HSDP). Each
/// may consist of several flattened dimensions of the program's mesh.
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

    /// Returns the dimension of the spec's mesh that shards the tensor over these ranks, if there
    /// is one.
    pub(crate) fn sharding_dim(&self, spec: &DTensorSpec) -> Option<usize> {
        let dim = spec.mesh().dim(self.shard_name()).ok()?;
        matches!(spec.placements()[dim], Placement::Shard(_)).then_some(dim)
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
        self.replicate()
            .map(|dim| self.mesh.communicator(dim))
            .transpose()
    }
}

/// Returns the spec of a tensor of this shape that data parallelism shards on the mesh `data`. The
/// tensor is a parameter, or this rank's tensor-parallel shard of one. `sharding` is the sharded
/// dimension with its shard sizes, or `None` if the tensor is replicated.
pub(crate) fn data_spec(
    data: &FsdpMeshInfo,
    sharding: Option<&(usize, ShardSizes)>,
    shape: &[usize],
    dtype: DType,
) -> Result<DTensorSpec> {
    let mesh = &data.mesh;
    let shard = data.shard;
    let mut placements = vec![Placement::Replicate; mesh.ndim()];
    if let Some((dim, _)) = sharding {
        placements[shard] = Placement::Shard(*dim);
    }
    let layout = with_sizes(Layout::new(mesh.shape(), &placements)?, shard, sharding)?;
    DTensorSpec::new(mesh, layout, shape.to_vec().into(), dtype)
}

/// Returns the layout with the shard sizes of `sharding` along the mesh dimension `shard`.
fn with_sizes(
    layout: Layout,
    shard: usize,
    sharding: Option<&(usize, ShardSizes)>,
) -> Result<Layout> {
    match sharding {
        Some((_, ShardSizes::Uneven(lengths))) => {
            Ok(layout.with_uneven_sizes(shard, lengths.clone())?)
        }
        _ => Ok(layout),
    }
}

/// Returns the spec of a parameter that is first sharded by tensor parallelism, as `tensor`
/// describes, and then by data parallelism. The tensor-parallel shard is split further, as
/// `sharding` describes, over the dimension of `data` that shards.
///
/// ```text
/// parallelize   on tp                  [S(0)]
/// fully_shard   on (replicate, shard)  [R, S(0)]
/// combined      on their common mesh   [R, S(0), S(0); dim 0 sharded by mesh dims 2, 1]
/// ```
///
/// # Errors
/// [`ParamError::Meshes`] unless both meshes are slices of one mesh along different dimensions.
pub(crate) fn combine(
    data: &FsdpMeshInfo,
    sharding: Option<&(usize, ShardSizes)>,
    tensor: &DTensorSpec,
) -> Result<DTensorSpec> {
    let dim = sharding.map(|(dim, _)| *dim);
    let tp = tensor.mesh();
    let mesh = data
        .mesh
        .concatenate(&[tp])
        .map_err(|_| ParamError::Meshes {
            data: data.mesh.to_string(),
            tensor: tp.to_string(),
        })?;

    let mut placements = vec![Placement::Replicate; mesh.ndim()];
    let shard = mesh.dim(data.shard_name())?;
    if let Some(dim) = dim {
        placements[shard] = Placement::Shard(dim);
    }
    let of_tensor: Vec<usize> = tp
        .names()
        .iter()
        .map(|name| mesh.dim(name))
        .collect::<Result<_>>()?;
    for (&outer, &placement) in of_tensor.iter().zip(tensor.placements()) {
        placements[outer] = placement;
    }
    let outer = dim.map_or(&[][..], |dim| tensor.layout().shard_order(dim));
    let layout = match dim {
        Some(dim) if !outer.is_empty() => {
            let order: Vec<_> = outer
                .iter()
                .map(|&sharding| of_tensor[sharding])
                .chain([shard])
                .collect();
            Layout::with_shard_order(mesh.shape(), &placements, &[(dim, &order)])?
        }
        _ => Layout::new(mesh.shape(), &placements)?,
    };
    DTensorSpec::new(
        &mesh,
        with_sizes(layout, shard, sharding)?,
        tensor.shape().clone(),
        tensor.dtype(),
    )
}
