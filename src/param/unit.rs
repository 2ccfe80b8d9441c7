//! [`Unit`]: an FSDP unit, whose parameters are gathered and reduced together.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock, Weak};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Shape};
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;

use super::collectives::CachedPlan;
use super::counts::ProgramCounts;
use super::data_mesh::FsdpMeshInfo;
use super::offload::CpuOffload;
use super::options::{GradientDivideFactors, Precision, RuntimeOptions, cast};
use super::reduction::PartialGradGroups;
use super::reduction::gradients::AccumulatedGrads;
use super::replica_check::ReplicaCheck;
use super::shards::LocalShards;
use super::shards::ShardMarker;
use super::states::ParamStateHandle;
use super::storage::UnshardedCopies;
use super::unit_name::UnitName;
use super::{BufferSync, ParamError, ReshardAfterForward};
use crate::burn_compat::is_about_dtypes;
use crate::comm::{Communicator, ShardedModel};
use crate::dtensor::{DTensorSpec, MeshDims};
use crate::pattern::PathPattern;
use crate::placement::{Placement, ShardSizes};
use crate::{Error, Result};

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
        let (spec, mesh_dim) = (&self.spec, self.sharding_dim?);
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
    pub(crate) again: Communicator,
    /// Duplicate of `shard` for the reductions of backward.
    pub(crate) reduce: Communicator,
    /// Group of the mesh dimension that replicates (HSDP), for the reductions of backward.
    pub(crate) replicate: Option<Communicator>,
    /// Group of [`ReshardAfterForward::Ranks`], for the all-gathers of backward.
    pub(crate) post_forward_group: Option<Communicator>,
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
        let (number, replicate, post_forward_group) = (
            shard.draw_model(),
            draw(replicate),
            draw(post_forward_group),
        );
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

    fn of(&self, number: u64) -> ShardedModel {
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
    fn model_over(&self, group: &Communicator) -> Option<ShardedModel> {
        (self.shard.group() == group.group()).then(|| self.model.of(self.model.shard))
    }

    /// Returns the signature that all ranks with distinct data must agree on.
    pub(crate) fn model_of_all(&self) -> ShardedModel {
        self.model.of(self.model.all)
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

/// Form in which a unit's gathered parameters remain between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    /// The unsharded parameters.
    Full,
    /// A shard over a group of neighbouring ranks.
    Part,
    /// Only this rank's own shard.
    Shard,
}

/// An FSDP unit: the parameters that one all-gather and one reduce-scatter transfer, their groups,
/// and their state.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) params: Vec<UnitParam>,
    /// Markers of the shards in records, one for each parameter.
    pub(crate) parts: Vec<Option<ShardMarker>>,
    /// `None` if only `parallelize` distributed the parameters.
    pub(crate) data: Option<DataParallelGroups>,
    /// Groups of tensor-parallel ranks over which backward sums partial gradients.
    pub(crate) tensor: Option<PartialGradGroups>,
    /// Paths of its modules, with the unit's label in the ledger, in signatures and in errors.
    path: RwLock<UnitName>,
    /// The model that the unit belongs to: the origin of the most recent `fully_shard` call whose
    /// model contains it.
    root: RwLock<Option<Arc<str>>>,
    /// Modules that have already passed `check_not_replaced`, each as (depth of its first
    /// distributed parameter, that parameter's index, number of distributed parameters, number of
    /// other float tensors).
    checked_modules: Mutex<SmallVec<[[usize; 4]; 2]>>,
    /// Plans of its collectives.
    pub(crate) plans: Mutex<SmallVec<[CachedPlan; 3]>>,
    /// Numbers of passes that trained a parameter: one count for the unit, then one for each
    /// parameter that was read outside the unit.
    pub(crate) passed: Box<[AtomicU64]>,
    /// Options that the program changes at run time.
    pub(crate) control: Mutex<RuntimeOptions>,
    /// Gradients that are accumulated without reduction.
    pub(crate) accumulated: AccumulatedGrads,
    /// The unsharded copies of its parameters.
    pub(crate) copies: UnshardedCopies,
    /// Numbers of its forwards and backwards.
    pub(crate) counts: Arc<ProgramCounts>,
    /// The unit that was entered after this one in the most recent forward.
    pub(crate) follower: Mutex<Option<Weak<Unit>>>,
    /// The units to prefetch next, if the program has named them.
    pub(crate) prefetch: Mutex<Prefetches>,
    /// The parameter that was first read outside the unit.
    pub(crate) first_outside: OnceLock<usize>,
    /// True if the program was warned about reads outside the unit.
    pub(crate) warned: AtomicBool,
}

/// The units that are prefetched when another one is gathered, if the program has named them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Prefetches {
    pub(crate) forward: Option<Vec<Weak<Unit>>>,
    pub(crate) backward: Option<Vec<Weak<Unit>>>,
}

/// Maximum number of modules that a unit remembers to have passed `check_not_replaced`.
const MAX_CHECKED_MODULES: usize = 16;

/// Name of the duplicated communicators on which backward's all-gathers are issued. These calls are
/// ordered independently of backward's [reductions](super::reduction::REDUCE) and of forward's
/// collectives.
pub(crate) const AGAIN: &str = "burn_dtensor::gathered again";

impl Unit {
    /// Creates the unit of the modules at `path`.
    ///
    /// # Errors
    /// [`ParamError::TensorMeshes`] for parameters parallelized over different meshes.
    pub(crate) fn new(
        path: UnitName,
        params: Vec<UnitParam>,
        data: Option<DataParallelGroups>,
    ) -> Result<Self> {
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
        let reshard = data
            .as_ref()
            .map_or(ReshardAfterForward::Never, |data| data.reshard);
        Ok(Self {
            root: RwLock::new(data.as_ref().map(|data| data.model.origin.clone())),
            parts: params
                .iter()
                .map(|param| ShardMarker::of(&param.spec))
                .collect(),
            passed: (0..=params.len()).map(|_| AtomicU64::new(0)).collect(),
            params,
            data,
            tensor,
            path: RwLock::new(path),
            checked_modules: Mutex::default(),
            plans: Mutex::default(),
            control: Mutex::new(RuntimeOptions::new(reshard)),
            accumulated: AccumulatedGrads::default(),
            copies: UnshardedCopies::default(),
            counts: Arc::default(),
            follower: Mutex::default(),
            prefetch: Mutex::default(),
            first_outside: OnceLock::new(),
            warned: AtomicBool::new(false),
        })
    }

    /// Runs `check`, unless a module with these properties has passed it.
    pub(crate) fn check_once<E>(
        &self,
        key: [usize; 4],
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        if self.checked_modules.lock().contains(&key) {
            return Ok(());
        }
        check()?;
        let mut checked = self.checked_modules.lock();
        if checked.len() == MAX_CHECKED_MODULES {
            checked.clear();
        }
        checked.push(key);
        Ok(())
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

    pub(crate) fn data(&self) -> &DataParallelGroups {
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

    /// Gives the unit its path in an enclosing model of this origin. It is no longer the root.
    pub(crate) fn adopt(&self, path: UnitName, origin: &Arc<str>) {
        *self.path.write() = path;
        *self.root.write() = Some(origin.clone());
    }

    /// Makes the unit belong to the model of `other`.
    pub(crate) fn join(&self, other: &Self) {
        *self.root.write() = other.model_root();
    }

    /// Returns the model that the unit belongs to, identified by its address. Returns `None` if
    /// `fully_shard` did not make the unit.
    pub(crate) fn model_root(&self) -> Option<Arc<str>> {
        self.root.read().clone()
    }

    /// Records that an optimizer step, or another operation, replaces the unit's parameters. If the
    /// unit's backwards reduce gradients, accumulated gradients that are not reduced yet have
    /// missed the step.
    pub(crate) fn note_step(&self) {
        if self.accumulated.is_any() && !self.puts_off() {
            self.accumulated.miss_step();
        }
    }

    /// Returns true if a backward may now leave gradients to be reduced later.
    pub(crate) fn puts_off(&self) -> bool {
        let control = self.control.lock();
        let is_replicated = || {
            self.data
                .as_ref()
                .is_some_and(|data| data.replicate.is_some())
        };
        !control.sync || !control.all_reduce && is_replicated()
    }

    /// Returns true if it is a group unit of several modules.
    pub(crate) fn is_group(&self) -> bool {
        self.path.read().is_group()
    }

    /// Returns true if one of its modules contains one of `other`'s. Both must be of the same
    /// model.
    pub(crate) fn encloses(&self, other: &Self) -> bool {
        let other = other.path.read().clone();
        self.path.read().encloses(&other)
    }

    /// Returns true if it has the same modules as `other`, but its parameters are on another mesh.
    pub(crate) fn is_sibling_of(&self, other: &Self) -> bool {
        let mesh = |unit: &Self| unit.data.as_ref().map(|data| data.mesh.clone());
        mesh(self) != mesh(other) && *self.path.read() == *other.path.read()
    }

    /// Returns true if the pattern matches one of its modules.
    pub(crate) fn is_taken_by(&self, pattern: &PathPattern) -> bool {
        self.path.read().is_taken_by(pattern)
    }

    pub(crate) fn label(&self) -> Arc<str> {
        self.path.read().label().clone()
    }

    /// Returns the form in which the gathered parameters remain after forward.
    pub(crate) fn kept(&self) -> Kept {
        let Some(data) = self.data.as_ref().filter(|_| self.is_gathered()) else {
            return Kept::Full;
        };
        match self.control.lock().reshard {
            ReshardAfterForward::Never | ReshardAfterForward::Ranks(1) => Kept::Full,
            ReshardAfterForward::Auto if self.path.read().is_root() => Kept::Full,
            ReshardAfterForward::Always | ReshardAfterForward::Auto => Kept::Shard,
            ReshardAfterForward::Ranks(n) if n == data.shard.group().size() => Kept::Shard,
            ReshardAfterForward::Ranks(_) => Kept::Part,
        }
    }

    /// Returns the signature that the ranks that shard the unit must agree on when they run it with
    /// these shards.
    pub(crate) fn model(&self, shards: &LocalShards) -> Option<ShardedModel> {
        let model = &self.data.as_ref()?.model;
        Some(ShardedModel {
            states: ParamStateHandle::names(&shards.states),
            ..model.of(model.shard)
        })
    }

    /// Returns the signature that ranks of `group` must agree on for a collective of the model of
    /// these units. Returns `None` if they are not the ranks that shard one of them.
    pub(crate) fn model_over(units: &[Arc<Self>], group: &Communicator) -> Option<ShardedModel> {
        units
            .iter()
            .find_map(|unit| unit.data.as_ref()?.model_over(group))
    }

    /// Describes what decides the next all-gather of these shards. In debug builds it is part of
    /// the call, so that ranks that decide by different inputs fail at the decision.
    pub(crate) fn decision(&self, shards: &LocalShards) -> Option<Arc<str>> {
        cfg!(debug_assertions).then(|| {
            let (waiting, swept) = (self.counts.waiting(), self.counts.swept());
            let copies = self.copies.describe(shards);
            format!("{copies}; {waiting} forwards wait for a backward, swept {swept} times").into()
        })
    }

    /// Returns the next index in forward order, drawn from the group over which the unit is
    /// reduced.
    pub(crate) fn draw(&self) -> u64 {
        let group = self
            .data
            .as_ref()
            .map(|data| &data.shard)
            .or(self.tensor.as_ref().map(PartialGradGroups::all));
        group.map_or(0, |group| group.next_forward_index())
    }

    /// Returns the divisors of the unit's gradients.
    pub(crate) fn averaging(&self) -> GradientDivideFactors {
        let numbers = |data: &DataParallelGroups| {
            (
                data.shard.group().size(),
                data.ranks(),
                data.all.group().size(),
            )
        };
        let (sharding, ranks, averaged) = self.data.as_ref().map_or((1, 1, 1), numbers);
        self.control.lock().averaging(sharding, ranks, averaged)
    }

    /// Checks that an input is on the device on which the unit computes.
    ///
    /// # Panics
    /// Unwinds with [`ParamError::InputDevice`].
    pub(crate) fn check_input(&self, input: &DispatchTensor) {
        let Some(data) = &self.data else { return };
        let (device, own) = (Device::new(input.device()).inner(), data.shard.device());
        if device != *own {
            let (unit, device, own) = (
                self.label().to_string(),
                format!("{device:?}"),
                format!("{own:?}"),
            );
            Error::from(ParamError::InputDevice { unit, device, own }).unwind();
        }
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
        let is_selected =
            |(member, _): &(&usize, DispatchTensor)| self.params[**member].is_sharded() == sharded;
        members
            .iter()
            .zip(tensors)
            .filter(is_selected)
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
        let (mut sharded, mut replicated) = (sharded.into_iter(), replicated.into_iter());
        let next = |&member: &usize| match self.params[member].is_sharded() {
            true => sharded.next(),
            false => replicated.next(),
        };
        members.iter().filter_map(next).collect()
    }

    /// Returns the unit's label and model for messages, such as ``unit `blocks.0` of Net, sharded at
    /// src/main.rs:17``.
    pub(super) fn full_name(&self) -> String {
        let model = self
            .model_root()
            .map(|model| format!(" of {model}"))
            .unwrap_or_default();
        format!("unit `{}`{model}", self.label())
    }

    /// Returns a clause about the element type that the unit's policy sets, if it sets one, with the
    /// remedy for a panic whose `text` is about element types. `inside` are units inside this one,
    /// whose outputs it may have computed with.
    pub(super) fn precision_note(&self, text: &str, inside: &[(Arc<Self>, LocalShards)]) -> String {
        let weights = || self.params.iter().find_map(|param| param.compute);
        let Some(dtype) = self.precision().inputs.or_else(weights) else {
            return String::new();
        };
        let note = format!(", which computes in {}", dtype.name());
        if !is_about_dtypes(text) {
            return note;
        }
        let returns_other = |(unit, _): &(Arc<Self>, _)| {
            Some((
                unit.label(),
                unit.precision().outputs.filter(|&out| out != dtype)?,
            ))
        };
        let inner = inside.iter().find_map(returns_other).map(|(label, out)| {
        format!(
            ". Unit `{label}` inside it returns {}: set `with_output_dtype` for the outermost unit only, and a policy \
             without it for the others (`with_mixed_precision_for`)",
            out.name()
        )
    });
        let constants = ". Tensors of one operation must have the same dtype: inside the unit, create constants in the \
                     dtype of its input (`x.dtype()`), or create them before and pass them in its input, which is \
                     cast";
        note + inner.as_deref().unwrap_or(constants)
    }
}
