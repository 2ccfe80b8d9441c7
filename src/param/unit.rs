//! [`Unit`]: the parameters that are gathered and reduced together.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock, Weak};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::DType;
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;

use super::accumulated_grads::AccumulatedGrads;
use super::data_mesh::FsdpMeshInfo;
use super::offload::CpuOffload;
use super::partial_grad_groups::PartialGradGroups;
use super::pending_all_gather::{Keeps, Unsharded};
use super::plan_cache::PlanCache;
use super::precision::{Precision, cast};
use super::prepare::ModuleIoLayouts;
use super::replica_check::{Passed, ReplicaCheck};
use super::runtime_options::RuntimeOptions;
use super::shard_marker::ShardMarker;
use super::shards::LocalShards;
use super::states::ParamStateHandle;
use super::style::LayerStyles;
use super::unit_name::UnitName;
use super::{BufferSync, ParamError, ReshardAfterForward};
use crate::Result;
use crate::comm::{Communicator, ShardedModel};
use crate::dtensor::{DTensorSpec, MeshDims};
use crate::pattern::PathPattern;
use crate::placement::ShardSizes;

/// One parameter of a unit.
///
/// To a unit the *whole* is what its data-parallel ranks have together: the parameter, or this
/// rank's tensor-parallel shard of it.
#[derive(Debug)]
pub(crate) struct UnitParam {
    /// Path in the model it was distributed with.
    pub(crate) path: Arc<str>,
    /// Path parts from the unit's module down to the parameter.
    pub(crate) depth: usize,
    /// Shape of the whole.
    pub(crate) shape: Vec<usize>,
    /// The dimension cut over the data-parallel ranks, and how; `None` for a parameter each holds whole.
    pub(crate) sharding: Option<(usize, ShardSizes)>,
    /// What the stored shard is a part of, over all mesh dimensions that place it.
    pub(crate) spec: Arc<DTensorSpec>,
    /// What `parallelize` made of it.
    pub(crate) parallel: Option<TpPlacement>,
    /// The element type that it is gathered and computed with in; `None`: the stored one.
    pub(crate) compute: Option<DType>,
}

/// What [`parallelize`](crate::parallel::parallelize) made of a parameter.
#[derive(Debug, Clone)]
pub(crate) struct TpPlacement {
    /// The parameter on the tensor-parallel mesh.
    pub(crate) spec: Arc<DTensorSpec>,
    pub(crate) styles: Arc<LayerStyles>,
    /// What the modules around it take and return: each with the path parts from the module down to the parameter.
    pub(crate) modules: Vec<(usize, Arc<ModuleIoLayouts>)>,
    /// The dimensions of its mesh that are data-parallel too, for other parameters: ranks along them have data of
    /// their own.
    pub(crate) data_dims: MeshDims,
}

/// The data-parallel ranks of a unit: over these it is gathered and reduced.
#[derive(Debug, Clone)]
pub(crate) struct DataParallelGroups {
    /// The parameters that the call left out.
    pub(crate) ignored: Arc<[PathPattern]>,
    pub(crate) reshard: ReshardAfterForward,
    /// True if parameters may be read outside their unit.
    pub(crate) implicit_unshard: bool,
    pub(crate) buffer_sync: BufferSync,
    pub(crate) precision: Precision,
    /// If its shards are in host memory.
    pub(crate) offloaded: Option<CpuOffload>,
    pub(crate) verify: Arc<ReplicaCheck>,
    pub(crate) model: ModelNumbers,
    /// The mesh that cuts and replicates its parameters.
    pub(crate) mesh: FsdpMeshInfo,
    /// All ranks that have data of their own: what makes buffers equal, and by how many gradients are divided. More
    /// than those of `mesh` where these parameters are placed over some of them already.
    pub(crate) all: Communicator,
    /// Group of the mesh dimension that shards.
    pub(crate) shard: Communicator,
    /// The same ranks: what backward gathers again.
    pub(crate) again: Communicator,
    /// The same ranks: what backward reduces.
    pub(crate) reduce: Communicator,
    /// Group of the mesh dimension that replicates (HSDP): what backward reduces.
    pub(crate) replicate: Option<Communicator>,
    /// Group of [`ReshardAfterForward::Ranks`]: what backward gathers again.
    pub(crate) post_forward_group: Option<Communicator>,
}

/// The numbers of a model, among those that were sharded over the same ranks: of each of the groups that are its
/// units'.
#[derive(Debug, Clone)]
pub(crate) struct ModelNumbers {
    pub(super) shard: u64,
    pub(super) replicate: u64,
    pub(super) post_forward_group: u64,
    /// Of all ranks that have data of their own.
    pub(super) all: u64,
    /// What it is, and where it was sharded.
    pub(crate) origin: Arc<str>,
}

impl ModelNumbers {
    /// Draws the next numbers on these groups.
    pub(crate) fn draw(
        origin: Arc<str>,
        shard: &Communicator,
        replicate: Option<&Communicator>,
        post_forward_group: Option<&Communicator>,
        all: &Communicator,
    ) -> Self {
        let draw = |group: Option<&Communicator>| group.map_or(0, Communicator::draw_model);
        let (number, replicate, post_forward_group) = (shard.draw_model(), draw(replicate), draw(post_forward_group));
        let all = if all.group() == shard.group() { number } else { all.draw_model() };
        Self { shard: number, replicate, post_forward_group, all, origin }
    }

    fn of(&self, number: u64) -> ShardedModel {
        ShardedModel { number, states: Arc::default(), origin: self.origin.clone() }
    }
}

impl DataParallelGroups {
    /// Returns what ranks of `group` must agree on that make a collective for the model, and not for a unit; `None` if
    /// they are not those that shard.
    fn model_over(&self, group: &Communicator) -> Option<ShardedModel> {
        (self.shard.group() == group.group()).then(|| self.model.of(self.model.shard))
    }

    /// Returns what all ranks that have data of their own must agree on.
    pub(super) fn model_of_all(&self) -> ShardedModel {
        self.model.of(self.model.all)
    }

    /// How many ranks gather and reduce it.
    pub(super) fn ranks(&self) -> usize {
        self.shard.group().size() * self.replicate.as_ref().map_or(1, |group| group.group().size())
    }
}

/// What remains of a unit's gathered parameters between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// The whole parameters.
    Full,
    /// A shard over a few neighbouring ranks.
    Part,
    /// Nothing beyond this rank's own shard.
    Shard,
}

/// The parameters that one all-gather and one reduce-scatter move, and their groups.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) params: Vec<UnitParam>,
    /// What records say of their shards.
    pub(super) parts: Vec<Option<ShardMarker>>,
    /// `None` after `parallelize` alone.
    pub(super) data: Option<DataParallelGroups>,
    /// The tensor-parallel ranks, on which gradients may be partial: what backward adds up.
    pub(super) tensor: Option<PartialGradGroups>,
    /// Where its modules are: its name in the ledger, in fingerprints and in errors.
    path: RwLock<UnitName>,
    /// The model that it is of: the origin of the call of `fully_shard` that was the last to be given it.
    root: RwLock<Option<Arc<str>>>,
    /// What modules around its parameters look like that were found to be whole.
    checked_modules: Mutex<SmallVec<[[usize; 3]; 2]>>,
    pub(super) plans: PlanCache,
    pub(super) passed: Passed,
    /// What the program has it do from now on.
    pub(super) control: Mutex<RuntimeOptions>,
    /// Gradients that are not reduced yet.
    pub(super) waiting: AccumulatedGrads,
    pub(super) unsharded: Mutex<Option<Unsharded>>,
    /// The passes that keep what forward has gathered.
    pub(super) keeping: Mutex<Vec<Weak<dyn Keeps>>>,
    /// The number of passes that forward has left and that are there.
    pub(super) left: AtomicUsize,
    /// The number of those at which they are [swept](super::sweep).
    pub(super) swept_at: AtomicUsize,
    /// The unit that was entered after it last.
    pub(super) follower: Mutex<Option<Weak<Unit>>>,
    /// The units to gather next, if the program has said which.
    pub(super) prefetch: Mutex<Prefetches>,
    /// The parameter that was first read outside, and whether the program was warned.
    pub(super) first_outside: OnceLock<usize>,
    pub(super) warned: AtomicBool,
}

/// The units that are gathered once another is, if the program has said which.
#[derive(Debug, Clone, Default)]
pub(super) struct Prefetches {
    pub(super) forward: Option<Vec<Weak<Unit>>>,
    pub(super) backward: Option<Vec<Weak<Unit>>>,
}

/// The number of passes through a unit that may wait for a backward before the first sweep.
pub(super) const FEW_PASSES: usize = 2;

/// How many looks of modules a unit remembers.
const MAX_CHECKED_MODULES: usize = 16;

/// The sequence of the all-gathers that backward makes: they wait neither for its
/// [reductions](super::partial_grad_groups::REDUCE), nor for what forward makes.
pub(crate) const AGAIN: &str = "gathered again";

impl Unit {
    /// The unit of the modules at `path`.
    ///
    /// # Errors
    /// [`ParamError::TensorMeshes`] for parameters parallelized over different meshes.
    pub(super) fn new(path: UnitName, params: Vec<UnitParam>, data: Option<DataParallelGroups>) -> Result<Self> {
        let mut meshes = params.iter().filter_map(|param| Some((param, param.parallel.as_ref()?.spec.mesh())));
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
        let reshard = data.as_ref().map_or(ReshardAfterForward::Never, |data| data.reshard);
        Ok(Self {
            root: RwLock::new(data.as_ref().map(|data| data.model.origin.clone())),
            parts: params.iter().map(|param| ShardMarker::of(&param.spec)).collect(),
            passed: Passed::new(params.len()),
            params,
            data,
            tensor,
            path: RwLock::new(path),
            checked_modules: Mutex::default(),
            plans: PlanCache::default(),
            control: Mutex::new(RuntimeOptions::new(reshard)),
            waiting: AccumulatedGrads::default(),
            unsharded: Mutex::new(None),
            keeping: Mutex::default(),
            left: AtomicUsize::new(0),
            swept_at: AtomicUsize::new(FEW_PASSES),
            follower: Mutex::default(),
            prefetch: Mutex::default(),
            first_outside: OnceLock::new(),
            warned: AtomicBool::new(false),
        })
    }

    /// Patterns of the parameters that its call has left out.
    pub(super) fn ignored(&self) -> &[PathPattern] {
        self.data.as_ref().map_or(&[], |data| &data.ignored)
    }

    /// Whether a module that looks like this was found to be whole.
    pub(super) fn has_passed_check(&self, key: [usize; 3]) -> bool {
        self.checked_modules.lock().contains(&key)
    }

    /// A module that looks like this is whole.
    pub(super) fn note_passed_check(&self, key: [usize; 3]) {
        let mut full = self.checked_modules.lock();
        if full.len() == MAX_CHECKED_MODULES {
            full.clear();
        }
        full.push(key);
    }

    /// Whether `fully_shard` made it.
    pub(crate) fn is_data_parallel(&self) -> bool {
        self.data.is_some()
    }

    /// Whether its weights are to be brought together: a group of one holds the wholes, if it holds them where it
    /// computes.
    pub(super) fn is_gathered(&self) -> bool {
        self.is_of_several() || self.offloaded().is_some()
    }

    /// Whether several ranks have its parts.
    pub(super) fn is_of_several(&self) -> bool {
        self.data.as_ref().is_some_and(|data| data.shard.group().size() > 1)
    }

    /// How its weights come to where its ranks compute, if its shards are in host memory.
    pub(crate) fn offloaded(&self) -> Option<&CpuOffload> {
        self.data.as_ref()?.offloaded.as_ref()
    }

    /// The groups that `fully_shard` gave it.
    pub(crate) fn data_parallel(&self) -> Option<&DataParallelGroups> {
        self.data.as_ref()
    }

    pub(super) fn data(&self) -> &DataParallelGroups {
        self.data.as_ref().expect("only a data-parallel unit cuts its parameters")
    }

    /// The element types that it computes and reduces in.
    pub(super) fn precision(&self) -> Precision {
        self.data.as_ref().map_or_else(Precision::default, |data| data.precision)
    }

    /// The element type that the parameter `member` is computed with in, of which this is a shard.
    pub(super) fn computed_dtype(&self, member: usize, shard: &DispatchTensor) -> DType {
        self.params[member].compute.filter(|_| shard.dtype().is_float()).unwrap_or_else(|| shard.dtype())
    }

    /// Shards of `members`, of which those that are cut (or else the others) are in the element types that they are
    /// computed with in.
    pub(super) fn computed(
        &self,
        sharded: bool,
        members: &[usize],
        shards: Vec<DispatchTensor>,
    ) -> Vec<DispatchTensor> {
        let computed = |(&member, shard): (&usize, _)| {
            let param = &self.params[member];
            cast(shard, param.compute.filter(|_| param.sharding.is_some() == sharded))
        };
        members.iter().zip(shards).map(computed).collect()
    }

    /// Gives the unit its path in an enclosing model, of that origin; it is a root no longer.
    pub(crate) fn adopt(&self, path: UnitName, origin: &Arc<str>) {
        *self.path.write() = path;
        *self.root.write() = Some(origin.clone());
    }

    /// Makes the unit one of the model that `other` is of.
    pub(crate) fn join(&self, other: &Self) {
        *self.root.write() = other.model_root();
    }

    /// Returns the model that it is of, told apart by the address; `None` unless `fully_shard` was given it.
    pub(super) fn model_root(&self) -> Option<Arc<str>> {
        self.root.read().clone()
    }

    /// An optimizer steps the unit's parameters, or something else replaces them. What waits of a unit whose backwards
    /// are to reduce has missed the step.
    pub(super) fn note_step(&self) {
        if self.waiting.is_any() && !self.puts_off() {
            self.waiting.miss_step();
        }
    }

    /// Returns true if a backward may leave gradients that are reduced later, from now on.
    pub(super) fn puts_off(&self) -> bool {
        let control = self.control.lock();
        let is_replicated = || self.data.as_ref().is_some_and(|data| data.replicate.is_some());
        !control.sync || !control.all_reduce && is_replicated()
    }

    /// Whether it is of several modules.
    pub(crate) fn is_group(&self) -> bool {
        self.path.read().is_group()
    }

    /// Whether a module of it holds one of `other`, of the same model.
    pub(super) fn encloses(&self, other: &Self) -> bool {
        let other = other.path.read().clone();
        self.path.read().encloses(&other)
    }

    /// Whether it is of the same modules as `other`, whose parameters are on another mesh.
    pub(super) fn is_sibling_of(&self, other: &Self) -> bool {
        let mesh = |unit: &Self| unit.data.as_ref().map(|data| data.mesh.clone());
        mesh(self) != mesh(other) && *self.path.read() == *other.path.read()
    }

    /// Whether the pattern takes a module of it.
    pub(super) fn is_taken_by(&self, pattern: &PathPattern) -> bool {
        self.path.read().is_taken_by(pattern)
    }

    pub(crate) fn label(&self) -> Arc<str> {
        self.path.read().label().clone()
    }

    /// What is left of the gathered parameters after forward.
    pub(super) fn kept(&self) -> Kept {
        let root = self.path.read().is_root();
        let Some(data) = &self.data else { return Kept::Full };
        let size = data.shard.group().size();
        if !self.is_gathered() {
            return Kept::Full;
        }
        match self.control.lock().reshard {
            ReshardAfterForward::Always => Kept::Shard,
            ReshardAfterForward::Never => Kept::Full,
            ReshardAfterForward::Auto => {
                if root {
                    Kept::Full
                } else {
                    Kept::Shard
                }
            }
            ReshardAfterForward::Ranks(1) => Kept::Full,
            ReshardAfterForward::Ranks(n) if n == size => Kept::Shard,
            ReshardAfterForward::Ranks(_) => Kept::Part,
        }
    }

    /// Returns what ranks that run the unit with these shards must agree on, of those that shard it.
    pub(super) fn model(&self, shards: &LocalShards) -> Option<ShardedModel> {
        let model = &self.data.as_ref()?.model;
        Some(ShardedModel { states: ParamStateHandle::names(&shards.states), ..model.of(model.shard) })
    }

    /// Returns what ranks of `group` must agree on that make a collective for the model of these units; `None` if they
    /// are not the ranks that shard one of them.
    pub(crate) fn model_over(units: &[Arc<Self>], group: &Communicator) -> Option<ShardedModel> {
        units.iter().find_map(|unit| unit.data.as_ref()?.model_over(group))
    }

    /// The place of a pass in forward, on the ranks that it is reduced over.
    pub(super) fn draw(&self) -> u64 {
        let group = self.data.as_ref().map(|data| &data.shard).or(self.tensor.as_ref().map(PartialGradGroups::all));
        group.map_or(0, |group| group.next_forward_index())
    }

    /// The tensors of the cut parameters.
    pub(super) fn sharded_of(&self, members: &[usize], tensors: Vec<DispatchTensor>) -> Vec<DispatchTensor> {
        let sharded =
            |(&member, tensor): (&usize, DispatchTensor)| self.params[member].sharding.is_some().then_some(tensor);
        members.iter().zip(tensors).filter_map(sharded).collect()
    }

    /// The tensors of the parameters every rank holds whole.
    pub(super) fn replicated_of(&self, members: &[usize], tensors: Vec<DispatchTensor>) -> Vec<DispatchTensor> {
        let replicated =
            |(&member, tensor): (&usize, DispatchTensor)| self.params[member].sharding.is_none().then_some(tensor);
        members.iter().zip(tensors).filter_map(replicated).collect()
    }

    /// Puts tensors of the cut parameters and of the others back into the order of `members`.
    pub(super) fn merge(
        &self,
        members: &[usize],
        sharding: Vec<DispatchTensor>,
        replicated: Vec<DispatchTensor>,
    ) -> Vec<DispatchTensor> {
        let (mut sharded, mut replicated) = (sharding.into_iter(), replicated.into_iter());
        let next = |&member: &usize| match self.params[member].sharding {
            Some(_) => sharded.next(),
            None => replicated.next(),
        };
        members.iter().filter_map(next).collect()
    }
}
