//! [`UnitSpec`]: what `fully_shard` and `parallelize` fixed for an FSDP unit.

use std::any::Any;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape};

use super::data_mesh::FsdpMeshInfo;
use super::offload::CpuOffload;
use super::options::{Precision, cast};
use super::reduction::buckets::Buckets;
use super::reduction::partial_groups::PartialGradGroups;
use super::replica_check::ReplicaCheck;
use super::shards::ShardMarker;
use super::{BufferSync, ParamError, ReshardAfterForward};
use crate::Result;
use crate::comm::{Communicator, ShardedModel};
use crate::dtensor::{DTensorSpec, MeshDims};
use crate::pattern::PathPattern;
use crate::placement::{Placement, ShardSizes};

/// One parameter of a unit.
///
/// For a unit, the *full* parameter is the one that its data-parallel ranks hold together: the
/// parameter, or this rank's tensor-parallel shard of it.
#[derive(Debug, Clone)]
pub(crate) struct UnitParam {
    /// Path in the model with which it was distributed.
    pub(crate) path: Arc<str>,
    /// Number of path components from the unit's module down to the parameter.
    pub(crate) depth: usize,
    /// Placement of the stored shard on the mesh of all dimensions that place it.
    pub(crate) spec: Arc<DTensorSpec>,
    /// Dimension of the spec's mesh that shards it over the data-parallel ranks; `None` for a
    /// replicated parameter.
    pub(crate) sharding_dim: Option<usize>,
    /// Tensor-parallel placement by `parallelize`, if any.
    pub(crate) parallel: Option<TpPlacement>,
    /// Element type in which it is gathered and used in computations. `None`: the type in which it
    /// is stored.
    pub(crate) compute: Option<DType>,
}

impl UnitParam {
    /// Returns true if the data-parallel ranks shard it.
    pub(crate) fn is_sharded(&self) -> bool {
        self.sharding_dim.is_some()
    }

    /// Returns the shape of the full parameter.
    pub(crate) fn shape(&self) -> Shape {
        self.parallel.as_ref().map_or_else(
            || self.spec.shape().clone(),
            |parallel| parallel.spec.local_shape(),
        )
    }

    /// Returns the dimension that the data-parallel ranks shard, and the shard sizes.
    pub(crate) fn sharding(&self) -> Option<(usize, ShardSizes)> {
        let spec = &self.spec;
        let mesh_dim = self.sharding_dim?;
        let Placement::Shard(dim) = spec.placements()[mesh_dim] else {
            return None;
        };
        Some((
            dim,
            spec.layout()
                .shard_sizes(spec.shape(), spec.coordinate(), mesh_dim),
        ))
    }
}

/// Tensor-parallel placement of a parameter by [`parallelize`](crate::parallel::parallelize).
#[derive(Debug, Clone)]
pub(crate) struct TpPlacement {
    /// The parameter on the tensor-parallel mesh.
    pub(crate) spec: Arc<DTensorSpec>,
    /// Record of the parameter's layer. This module only carries it.
    pub(crate) layer: Arc<dyn Any + Send + Sync>,
    /// Dimensions of the tensor-parallel mesh that are data-parallel for other parameters: ranks
    /// along them have distinct data.
    pub(crate) data_dims: MeshDims,
}

/// The data-parallel ranks of a unit, over which it is gathered and reduced, and the options of its
/// `fully_shard` call.
#[derive(Debug, Clone)]
pub(crate) struct DataParallelGroups {
    /// Patterns of the parameters that the call ignored.
    pub(crate) ignored: Arc<[PathPattern]>,
    pub(crate) reshard: ReshardAfterForward,
    /// True if parameters may be read outside their unit.
    pub(crate) implicit_unshard: bool,
    pub(crate) buffer_sync: BufferSync,
    /// True if each forward of the model makes its buffers equal on all ranks.
    pub(crate) forward_sync_buffers: bool,
    pub(crate) precision: Precision,
    /// Copies between host memory and the device, if the unit's shards are in host memory.
    pub(crate) offloaded: Option<CpuOffload>,
    pub(crate) verify: Arc<ReplicaCheck>,
    pub(crate) model: ModelNumbers,
    /// The mesh that shards and replicates its parameters.
    pub(crate) mesh: FsdpMeshInfo,
    /// All ranks that have distinct data. Buffers are synchronized over them, and gradients are
    /// divided by their number. They include more ranks than `mesh` if these parameters are already
    /// placed over some data-parallel dimensions (expert parallelism).
    pub(crate) all: Communicator,
    /// Group of the mesh dimension that shards.
    pub(crate) shard: Communicator,
    /// Duplicate of `shard` for the all-gathers of backward.
    pub(crate) backward_gather: Communicator,
    /// Duplicate of `shard` for the reductions of backward.
    pub(crate) reduce: Communicator,
    /// Group of the mesh dimension that replicates (HSDP), for the reductions of backward.
    pub(crate) replicate: Option<Communicator>,
    /// Group of [`ReshardAfterForward::Ranks`], for the all-gathers of backward.
    pub(crate) post_forward_group: Option<Communicator>,
    /// True if it is an error that a rank does not use a parameter.
    pub(crate) refuses_unused: bool,
    /// Buckets in which units are reduced together, if all their parameters are replicated.
    pub(crate) buckets: Option<Arc<Buckets>>,
}

/// Numbers of a model in each of its units' groups, by which ranks distinguish models that were
/// sharded over the same ranks.
#[derive(Debug, Clone)]
pub(crate) struct ModelNumbers {
    pub(crate) shard: u64,
    pub(crate) replicate: u64,
    pub(crate) post_forward_group: u64,
    /// Number in the group of all ranks that have distinct data.
    pub(crate) all: u64,
    /// Type of the model, and the source location at which it was sharded.
    pub(crate) origin: Arc<str>,
}

impl ModelNumbers {
    /// Draws the next number in each of these groups.
    pub(crate) fn draw(
        origin: Arc<str>,
        shard: &Communicator,
        replicate: Option<&Communicator>,
        post_forward_group: Option<&Communicator>,
        all: &Communicator,
    ) -> Self {
        let draw = |group: Option<&Communicator>| group.map_or(0, Communicator::draw_model);
        let number = shard.draw_model();
        let replicate = draw(replicate);
        let post_forward_group = draw(post_forward_group);
        let all = if all.group() == shard.group() {
            number
        } else {
            all.draw_model()
        };
        Self {
            shard: number,
            replicate,
            post_forward_group,
            all,
            origin,
        }
    }

    /// Returns what ranks of a group must agree on, in which the model has this number.
    pub(super) fn signature(&self, number: u64) -> ShardedModel {
        ShardedModel {
            number,
            states: Arc::default(),
            origin: self.origin.clone(),
        }
    }
}

impl DataParallelGroups {
    /// Returns the signature that ranks of `group` must agree on for a collective of the model as
    /// opposed to a unit. Returns `None` if `group` is not the one that shards.
    pub(super) fn model_over(&self, group: &Communicator) -> Option<ShardedModel> {
        (self.shard.group() == group.group()).then(|| self.model.signature(self.model.shard))
    }

    /// Returns the signature that all ranks with distinct data must agree on.
    pub(crate) fn model_of_all(&self) -> ShardedModel {
        self.model.signature(self.model.all)
    }

    /// Returns the number of ranks that gather and reduce the unit.
    pub(crate) fn ranks(&self) -> usize {
        self.shard.group().size()
            * self
                .replicate
                .as_ref()
                .map_or(1, |group| group.group().size())
    }
}

/// The parameters of an FSDP unit, which one all-gather and one reduce-scatter transfer, the groups
/// of these collectives, and the options that were given to `fully_shard`.
///
/// It does not change. What the program sets later is in [`UnitComm`](super::unit_comm::UnitComm),
/// and what forward and backward change is in [`Unit`](super::unit::Unit).
#[derive(Debug)]
pub(crate) struct UnitSpec {
    pub(crate) params: Vec<UnitParam>,
    /// Markers of the shards in records, one for each parameter.
    pub(crate) markers: Vec<Option<ShardMarker>>,
    /// `None` if only `parallelize` distributed the parameters.
    pub(crate) data: Option<DataParallelGroups>,
    /// Groups of tensor-parallel ranks over which backward sums partial gradients.
    pub(crate) tensor: Option<PartialGradGroups>,
}

/// Name of the duplicated communicators on which backward's all-gathers are issued. These calls are
/// ordered independently of backward's [reductions](super::reduction::REDUCE) and of forward's
/// collectives.
pub(crate) const BACKWARD_GATHER: &str = "burn_dtensor::backward_gather";

impl UnitSpec {
    /// Describes a unit of these parameters.
    ///
    /// # Errors
    /// [`ParamError::TensorMeshes`] for parameters parallelized over different meshes.
    pub(super) fn new(params: Vec<UnitParam>, data: Option<DataParallelGroups>) -> Result<Self> {
        let mut meshes = params
            .iter()
            .filter_map(|param| Some((param, param.parallel.as_ref()?.spec.mesh())));
        let tensor = match meshes.next() {
            None => None,
            Some((first, mesh)) => {
                if let Some((param, other)) = meshes.find(|(_, other)| *other != mesh) {
                    return Err(ParamError::TensorMeshes {
                        param: first.path.to_string(),
                        mesh: mesh.to_string(),
                        other_param: param.path.to_string(),
                        other_mesh: other.to_string(),
                    }
                    .into());
                }
                Some(PartialGradGroups::of(mesh)?)
            }
        };
        Ok(Self {
            markers: params
                .iter()
                .map(|param| ShardMarker::of(&param.spec))
                .collect(),
            params,
            data,
            tensor,
        })
    }

    /// Returns true if its weights must be gathered: if several ranks shard it, or if its shards
    /// are in host memory and must be copied to the device.
    pub(crate) fn is_gathered(&self) -> bool {
        self.is_of_several() || self.offloaded().is_some()
    }

    /// Returns true if several ranks shard it.
    pub(crate) fn is_of_several(&self) -> bool {
        self.data
            .as_ref()
            .is_some_and(|data| data.shard.group().size() > 1)
    }

    /// Returns the copies between host memory and the device, if its shards are in host memory.
    pub(crate) fn offloaded(&self) -> Option<&CpuOffload> {
        self.data.as_ref()?.offloaded.as_ref()
    }

    /// Returns the buckets in which its gradients are reduced with those of other units.
    pub(crate) fn buckets(&self) -> Option<&Arc<Buckets>> {
        self.data.as_ref()?.buckets.as_ref()
    }

    /// Returns the groups of a unit that `fully_shard` made.
    pub(crate) fn sharded_data(&self) -> &DataParallelGroups {
        self.data
            .as_ref()
            .expect("only a data-parallel unit shards its parameters")
    }

    /// Returns the element types in which it computes and reduces.
    pub(crate) fn precision(&self) -> Precision {
        self.data
            .as_ref()
            .map_or_else(Precision::default, |data| data.precision)
    }

    /// Returns the element type in which the parameter `member`, with this shard, is used in
    /// computations.
    pub(crate) fn computed_dtype(&self, member: usize, shard: &DispatchTensor) -> DType {
        self.params[member]
            .compute
            .filter(|_| shard.dtype().is_float())
            .unwrap_or_else(|| shard.dtype())
    }

    /// Casts shards of `members` to the element types of the computation: those of sharded
    /// parameters if `sharded` is true, otherwise those of replicated ones. The others are returned
    /// unchanged.
    pub(crate) fn computed(
        &self,
        sharded: bool,
        members: &[usize],
        shards: Vec<DispatchTensor>,
    ) -> Vec<DispatchTensor> {
        let computed = |(&member, shard): (&usize, _)| {
            let param = &self.params[member];
            cast(
                shard,
                param.compute.filter(|_| param.is_sharded() == sharded),
            )
        };
        members.iter().zip(shards).map(computed).collect()
    }

    /// Returns the next index in forward order, drawn from the group over which the unit is
    /// reduced.
    pub(crate) fn next_forward_index(&self) -> u64 {
        let group = self
            .data
            .as_ref()
            .map(|data| &data.shard)
            .or(self.tensor.as_ref().map(PartialGradGroups::all));
        group.map_or(0, |group| group.next_forward_index())
    }

    /// Returns true if the unit is gathered and its backend overlaps the transfer with computation.
    pub(crate) fn moves_meanwhile(&self) -> bool {
        self.is_gathered()
            && self
                .data
                .as_ref()
                .is_some_and(|data| data.shard.moves_meanwhile())
    }

    /// Selects the tensors of the sharded parameters if `sharded` is true, otherwise those of the
    /// replicated ones.
    pub(crate) fn select(
        &self,
        sharded: bool,
        members: &[usize],
        tensors: Vec<DispatchTensor>,
    ) -> Vec<DispatchTensor> {
        members
            .iter()
            .zip(tensors)
            .filter(|(member, _)| self.params[**member].is_sharded() == sharded)
            .map(|(_, tensor)| tensor)
            .collect()
    }

    /// Merges tensors of the sharded and the replicated parameters into the order of `members`.
    pub(crate) fn merge(
        &self,
        members: &[usize],
        sharded: Vec<DispatchTensor>,
        replicated: Vec<DispatchTensor>,
    ) -> Vec<DispatchTensor> {
        let mut sharded = sharded.into_iter();
        let mut replicated = replicated.into_iter();
        members
            .iter()
            .filter_map(|&member| match self.params[member].is_sharded() {
                true => sharded.next(),
                false => replicated.next(),
            })
            .collect()
    }
}
