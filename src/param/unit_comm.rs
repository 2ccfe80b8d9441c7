//! [`UnitComm`]: a unit's collectives, executed by plans that it keeps.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Slice};
use itertools::Itertools;
use lru::LruCache;
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;

use super::gradient_hook::GradsWork;
use super::offload::CpuOffload;
use super::options::{GradientDivideFactors, Kept, RuntimeOptions};
use super::pending_all_gather::PendingAllGather;
use super::shard_codec::{self, ShardCodec};
use super::shards::LocalShards;
use super::states::ParamStateHandle;
use super::unit_name::UnitName;
use super::unit_spec::{UnitParam, UnitSpec};
use super::{ParamError, ReshardAfterForward};
use crate::Error;
use crate::comm::{
    Call, CollectivePlan, CommError, Communicator, Phase, ShardedModel, TensorMeta, Work,
};
use crate::dtensor::own;
use crate::error::OrUnwind;
use crate::pattern::PathPattern;
use crate::placement::ShardSizes;

/// A unit without the state of its forwards and backwards: its spec, its name, the options that the
/// program sets at run time, and its collectives.
#[derive(Debug)]
pub(crate) struct UnitComm {
    pub(crate) spec: UnitSpec,
    /// Paths of its modules, with the unit's label in the ledger, in signatures and in errors.
    path: RwLock<UnitName>,
    /// The model that the unit belongs to: the origin of the most recent `fully_shard` call whose
    /// model contains it.
    root: RwLock<Option<Arc<str>>>,
    /// Options that the program changes at run time.
    pub(crate) options: Mutex<RuntimeOptions>,
    /// Plans of its collectives, by the parameters that participate.
    plans: Mutex<PlanCache>,
}

impl UnitComm {
    /// Creates the collectives of the unit of the modules at `path`.
    pub(super) fn new(path: UnitName, spec: UnitSpec) -> Self {
        let data = spec.data.as_ref();
        let reshard = data.map_or(ReshardAfterForward::Never, |data| data.reshard);
        Self {
            path: RwLock::new(path),
            root: RwLock::new(data.map(|data| data.model.origin.clone())),
            options: Mutex::new(RuntimeOptions::new(reshard)),
            plans: Mutex::new(LruCache::new(MAX_PLANNED)),
            spec,
        }
    }

    /// Forgets the plans, because an option that they contain has changed.
    pub(crate) fn forget_plans(&self) {
        self.plans.lock().clear();
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

    /// Returns true if a backward may now leave gradients to be reduced later.
    pub(crate) fn puts_off(&self) -> bool {
        let control = self.options.lock();
        let is_replicated = || {
            self.spec
                .data
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
        let mesh = |unit: &Self| unit.spec.data.as_ref().map(|data| data.mesh.clone());
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
        let Some(data) = self.spec.data.as_ref().filter(|_| self.spec.is_gathered()) else {
            return Kept::Full;
        };
        match self.options.lock().reshard {
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
        let model = &self.spec.data.as_ref()?.model;
        Some(ShardedModel {
            states: ParamStateHandle::names(&shards.states),
            ..model.signature(model.shard)
        })
    }

    /// Returns the divisors of the unit's gradients.
    pub(crate) fn averaging(&self) -> GradientDivideFactors {
        let (sharding, ranks, averaged) = self.spec.data.as_ref().map_or((1, 1, 1), |data| {
            (
                data.shard.group().size(),
                data.ranks(),
                data.all.group().size(),
            )
        });
        self.options.lock().averaging(sharding, ranks, averaged)
    }

    /// Checks that an input is on the device on which the unit computes.
    ///
    /// # Panics
    /// Unwinds with [`ParamError::InputDevice`].
    pub(crate) fn check_input(&self, input: &DispatchTensor) {
        let Some(data) = &self.spec.data else { return };
        let (device, own) = (Device::new(input.device()).inner(), data.shard.device());
        if device != *own {
            let unit = self.label().to_string();
            let device = format!("{device:?}");
            let own = format!("{own:?}");
            Error::from(ParamError::InputDevice { unit, device, own }).unwind();
        }
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

    /// Starts a collective of the unit. `members` are indices of parameters. `tensors` are those of
    /// the members that this kind of collective transfers, followed by the flags for a reduction.
    ///
    /// # Collective
    /// Every rank of the [group](Self::group).
    pub(crate) fn exchange(
        &self,
        kind: UnitCollectiveKind,
        call: Call,
        members: &[usize],
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        let (group, call, plan) = match self.planned(kind, call, members, &tensors) {
            Ok(planned) => planned,
            Err(error) => return Work::failed(error),
        };
        let Some(custom) = self.options.lock().collectives.clone() else {
            return group.execute_plan(call, &plan, tensors);
        };
        match kind {
            UnitCollectiveKind::GatherShards | UnitCollectiveKind::GatherParts => {
                custom.all_gather(group, call, &plan, tensors)
            }
            UnitCollectiveKind::ReduceScatterGrads => {
                custom.reduce_scatter(group, call, &plan, tensors)
            }
            UnitCollectiveKind::ReduceReplicatedGrads | UnitCollectiveKind::ReduceOverReplicas => {
                custom.all_reduce(group, call, &plan, tensors)
            }
        }
    }

    /// Returns the ranks of a collective, its plan, and `call` with what the plan adds.
    fn planned(
        &self,
        kind: UnitCollectiveKind,
        call: Call,
        members: &[usize],
        tensors: &[DispatchTensor],
    ) -> Result<(&Communicator, Call, Arc<CollectivePlan>), CommError> {
        let (group, number) = self.group(kind, call.phase);
        let CachedPlan { names, plan, .. } = self.plan(kind, group, members, tensors)?;
        let call = Call {
            names: Some(names),
            model: call.model.map(|model| ShardedModel { number, ..model }),
            ..call
        };
        Ok((group, call, plan))
    }

    /// Starts the all-reduce of gradients, by the unit's hook if it has one. `tensors` are those of
    /// [`exchange`](Self::exchange).
    ///
    /// # Collective
    /// Every rank of the [group](Self::group).
    ///
    /// # Panics
    /// Unwinds with the error of the hook.
    pub(crate) fn all_reduce(
        &self,
        kind: UnitCollectiveKind,
        call: Call,
        members: &[usize],
        mut tensors: Vec<DispatchTensor>,
    ) -> GradsWork {
        let Some(hook) = self.options.lock().gradient_hook.clone() else {
            return self.exchange(kind, call, members, tensors).into();
        };
        let flags = tensors.pop().into_iter().collect();
        let (group, number) = self.group(kind, call.phase);
        let params = members.iter().map(|&member| &self.spec.params[member]);
        let is_sent = |param: &&UnitParam| {
            kind == UnitCollectiveKind::ReduceOverReplicas || !param.is_sharded()
        };
        let names = params.filter(is_sent).map(|param| param.path.clone());
        let call = Call {
            model: call
                .model
                .clone()
                .map(|model| ShardedModel { number, ..model }),
            ..call.with_names(names)
        };
        let op = match kind {
            UnitCollectiveKind::ReduceOverReplicas => self.averaging().replicate,
            _ => self.averaging().shard,
        };
        GradsWork::hooked(&*hook, group, call, op, tensors, flags).or_unwind()
    }

    /// Returns the ranks that participate in a collective of this kind, and the number of the
    /// unit's model among theirs. The all-gathers of backward are a separate sequence.
    fn group(&self, kind: UnitCollectiveKind, phase: Phase) -> (&Communicator, u64) {
        let data = self.spec.sharded_data();
        match kind {
            UnitCollectiveKind::GatherShards if phase == Phase::Backward => {
                (&data.backward_gather, data.model.shard)
            }
            UnitCollectiveKind::GatherShards => (&data.shard, data.model.shard),
            UnitCollectiveKind::GatherParts => {
                (self.post_forward_group(), data.model.post_forward_group)
            }
            UnitCollectiveKind::ReduceScatterGrads | UnitCollectiveKind::ReduceReplicatedGrads => {
                (&data.reduce, data.model.shard)
            }
            UnitCollectiveKind::ReduceOverReplicas => (
                data.replicate.as_ref().expect("the unit has replicas"),
                data.model.replicate,
            ),
        }
    }

    fn plan(
        &self,
        kind: UnitCollectiveKind,
        group: &Communicator,
        members: &[usize],
        tensors: &[DispatchTensor],
    ) -> Result<CachedPlan, CommError> {
        if let Some(planned) = self.plans.lock().get(members) {
            let known = planned.iter().find(|known| {
                let dtypes = tensors.iter().map(DispatchTensor::dtype);
                known.kind == kind && known.plan.dtypes().eq(dtypes)
            });
            if let Some(known) = known {
                return Ok(known.clone());
            }
        }
        let is_sent = |param: &&UnitParam| match kind {
            UnitCollectiveKind::GatherShards
            | UnitCollectiveKind::GatherParts
            | UnitCollectiveKind::ReduceScatterGrads => param.is_sharded(),
            UnitCollectiveKind::ReduceReplicatedGrads => !param.is_sharded(),
            UnitCollectiveKind::ReduceOverReplicas => true,
        };
        let params = members
            .iter()
            .map(|&member| &self.spec.params[member])
            .filter(is_sent);
        let names = params.clone().map(|param| param.path.clone()).collect();
        let metas = tensors.iter().map(|tensor| TensorMeta {
            shape: tensor.shape(),
            dtype: tensor.dtype(),
        });
        let shardings = params.filter_map(UnitParam::sharding);
        let plan = match kind {
            UnitCollectiveKind::GatherShards => group.plan_all_gather(full_metas(metas, shardings)),
            UnitCollectiveKind::GatherParts => {
                let shardings = shardings.map(|(dim, sizes)| (dim, post_forward_sizes(&sizes)));
                group.plan_all_gather(full_metas(metas, shardings))
            }
            UnitCollectiveKind::ReduceScatterGrads => {
                let flags = (0, ShardSizes::Chunked(group.group().size()));
                group.plan_reduce_scatter(
                    full_metas(metas, shardings.chain([flags])),
                    self.averaging().shard,
                )
            }
            UnitCollectiveKind::ReduceReplicatedGrads => {
                group.plan_all_reduce(&metas.collect_vec(), self.averaging().shard)
            }
            UnitCollectiveKind::ReduceOverReplicas => {
                group.plan_all_reduce(&metas.collect_vec(), self.averaging().replicate)
            }
        }?;
        let made = CachedPlan { kind, names, plan };
        self.plans
            .lock()
            .get_or_insert_mut(members.into(), SmallVec::new)
            .push(made.clone());
        Ok(made)
    }

    /// Starts an all-gather of the parameters at `members` from this rank's shards. The result is
    /// copied to the device as `offloaded` says, if the shards are in host memory. `codec` encodes
    /// the shards.
    ///
    /// The result is in the order of `members`, without those that every rank replicates.
    pub(crate) fn all_gather(
        &self,
        kind: UnitCollectiveKind,
        call: Call,
        members: &[usize],
        shards: Vec<DispatchTensor>,
        offloaded: Option<&CpuOffload>,
        codec: Option<Arc<dyn ShardCodec>>,
    ) -> PendingAllGather {
        let shards = self.spec.select(true, members, shards);
        if shards.is_empty() {
            return PendingAllGather::Done((Vec::new(), None));
        }
        let copy_in = offloaded.map(|offloaded| (offloaded.clone(), call.label.clone()).into());
        let work = match codec {
            None => self.exchange(kind, call, members, shards),
            Some(codec) => match self.planned(kind, call, members, &shards) {
                Ok((group, call, plan)) => {
                    shard_codec::all_gather(codec, group, call, &plan, shards)
                }
                Err(error) => Work::failed(error),
            },
        };
        PendingAllGather::InFlight(work, copy_in)
    }

    /// Returns the codec of the shards that are gathered for computation.
    pub(crate) fn codec(&self) -> Option<Arc<dyn ShardCodec>> {
        self.options.lock().codec.clone()
    }

    /// Returns this rank's shard of each unsharded parameter, over the post-forward group.
    pub(crate) fn split(
        &self,
        members: &[usize],
        unsharded: &[DispatchTensor],
    ) -> Vec<DispatchTensor> {
        let group = self.post_forward_group().group();
        let part = |(&member, full): (&usize, &DispatchTensor)| match self.spec.params[member]
            .sharding()
        {
            None => full.clone(),
            Some((dim, sizes)) => copy_range(
                full,
                dim,
                post_forward_sizes(&sizes).range(group.size(), group.rank()),
            ),
        };
        members.iter().zip(unsharded).map(part).collect()
    }

    fn post_forward_group(&self) -> &Communicator {
        self.spec
            .sharded_data()
            .post_forward_group
            .as_ref()
            .expect("post-forward shards exist only with a post-forward group")
    }
}

/// Returns the metadata of the full tensors of which these are the metadata of shards, with their
/// shardings. Full tensors, whose metadata does not change, are accepted too.
fn full_metas(
    metas: impl Iterator<Item = TensorMeta>,
    shardings: impl Iterator<Item = (usize, ShardSizes)>,
) -> Vec<(TensorMeta, usize, ShardSizes)> {
    metas
        .zip_eq(shardings)
        .map(|(mut meta, (dim, sizes))| {
            meta.shape[dim] = sizes.total();
            (meta, dim, sizes)
        })
        .collect()
}

/// Returns the shard sizes of a parameter over the ranks of
/// [`ReshardAfterForward::Ranks`](super::ReshardAfterForward::Ranks). They are even, also if the
/// shards from which the parameter was gathered are uneven.
pub(crate) fn post_forward_sizes(sharding: &ShardSizes) -> ShardSizes {
    ShardSizes::Chunked(sharding.total())
}

/// Copies `range` of dimension `dim`.
fn copy_range(tensor: &DispatchTensor, dim: usize, range: Range<usize>) -> DispatchTensor {
    let mut slices: Vec<_> = tensor
        .shape()
        .iter()
        .map(|&len| Slice::from(0..len))
        .collect();
    slices[dim] = Slice::from(range);
    own(Dispatch::float_slice(tensor.clone(), &slices))
}

/// Kind of a unit's collective on the tensors of some of its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnitCollectiveKind {
    /// All-gather of the shards of the sharded parameters.
    GatherShards,
    /// All-gather of the shards that the ranks of a post-forward group keep after forward: those
    /// that [`UnitComm::split`] made, on the device on which the ranks compute.
    GatherParts,
    /// Reduce-scatter of the gradients of the sharded parameters, with a row of flags for each
    /// rank.
    ReduceScatterGrads,
    /// All-reduce of the gradients of replicated parameters, with flags.
    ReduceReplicatedGrads,
    /// All-reduce of this rank's reduced gradients of all parameters over the replicas (HSDP), with
    /// flags.
    ReduceOverReplicas,
}

/// The plan of one kind of collective of some parameters, with tensors of these element types.
#[derive(Debug, Clone)]
pub(crate) struct CachedPlan {
    kind: UnitCollectiveKind,
    /// Names of the parameters whose tensors the collective transfers.
    names: Arc<[Arc<str>]>,
    plan: Arc<CollectivePlan>,
}

/// Plans by the parameters that participate.
type PlanCache = LruCache<Arc<[usize]>, SmallVec<[CachedPlan; 3]>>;

/// Number of sets of parameters of which a unit keeps plans. Usually there is one, that of all.
const MAX_PLANNED: NonZeroUsize = NonZeroUsize::new(16).unwrap();
