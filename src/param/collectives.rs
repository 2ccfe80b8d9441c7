//! The collectives of a unit, executed by plans that a [`PlanCache`] keeps, and the [`PendingAllGather`] of its parameters.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Slice};
use itertools::Itertools;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::offload::CpuOffload;
use super::unit::{Unit, UnitParam};
use crate::comm::{Call, CollectivePlan, CommError, Communicator, OpTiming, ShardedModel, TensorMeta, Work};
use crate::dtensor::own;
use crate::placement::ShardSizes;

impl Unit {
    /// Starts a collective of the unit over `group`. `members` are indices of parameters. `tensors` are those of the
    /// members that this kind of collective transfers, followed by the flags for a reduction.
    ///
    /// # Collective
    /// Every rank of `group`.
    pub(crate) fn exchange(
        &self,
        exchange: UnitCollectiveKind,
        group: &Communicator,
        call: Call,
        members: &[usize],
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        match self.plan(exchange, group, members, &tensors) {
            Ok(CachedPlan { names, plan, .. }) => {
                let model = call.model.map(|model| ShardedModel { number: self.model_number(exchange), ..model });
                let call = Call { names: Some(names), model, ..call };
                let custom = self.control.lock().collectives.clone();
                match custom {
                    Some(custom) => custom.exchange(exchange, group, call, &plan, tensors),
                    None => group.execute_plan(call, &plan, tensors),
                }
            }
            Err(error) => Work::failed(error),
        }
    }

    /// Returns the number of the unit's model among the models of the ranks that participate in this collective.
    fn model_number(&self, exchange: UnitCollectiveKind) -> u64 {
        let model = &self.data().model;
        match exchange {
            UnitCollectiveKind::Shards | UnitCollectiveKind::Gradients | UnitCollectiveKind::ReplicatedGradients => {
                model.shard
            }
            UnitCollectiveKind::Parts => model.post_forward_group,
            UnitCollectiveKind::All => model.replicate,
        }
    }

    fn plan(
        &self,
        exchange: UnitCollectiveKind,
        group: &Communicator,
        members: &[usize],
        tensors: &[DispatchTensor],
    ) -> Result<CachedPlan, CommError> {
        if let Some(known) = self.plans.find(exchange, members, tensors.iter().map(DispatchTensor::dtype)) {
            return Ok(known);
        }
        let params = members.iter().map(|&member| &self.params[member]).filter(|param| is_of(exchange, param));
        let names = params.clone().map(|param| param.path.clone()).collect();
        let metas = tensors.iter().map(|tensor| TensorMeta { shape: tensor.shape(), dtype: tensor.dtype() });
        let shardings = params.filter_map(|param| param.sharding.clone());
        let plan = match exchange {
            UnitCollectiveKind::Shards => group.plan_all_gather(full_metas(metas, shardings)),
            UnitCollectiveKind::Parts => {
                let shardings = shardings.map(|(dim, sizes)| (dim, post_forward_sizes(&sizes)));
                group.plan_all_gather(full_metas(metas, shardings))
            }
            UnitCollectiveKind::Gradients => {
                let flags = (0, ShardSizes::Chunked(group.group().size()));
                group.plan_reduce_scatter(full_metas(metas, shardings.chain([flags])), self.averaging().shard)
            }
            UnitCollectiveKind::ReplicatedGradients => {
                group.plan_all_reduce(&metas.collect_vec(), self.averaging().shard)
            }
            UnitCollectiveKind::All => group.plan_all_reduce(&metas.collect_vec(), self.averaging().replicate),
        };
        let known = CachedPlan { exchange, members: members.into(), names, plan: plan? };
        self.plans.keep(known.clone());
        Ok(known)
    }

    /// Starts an all-gather of the parameters at `members` from this rank's shards.
    ///
    /// The result is in the order of `members`, without those that every rank replicates.
    pub(crate) fn all_gather(
        &self,
        kind: UnitAllGather,
        call: Call,
        members: &[usize],
        shards: Vec<DispatchTensor>,
    ) -> PendingAllGather {
        let shards = self.sharded_of(members, shards);
        if shards.is_empty() {
            return PendingAllGather::Done((Vec::new(), None));
        }
        let (exchange, group, offloaded) = match kind {
            UnitAllGather::Forward => (UnitCollectiveKind::Shards, &self.data().shard, self.offloaded()),
            UnitAllGather::Backward => (UnitCollectiveKind::Shards, &self.data().again, self.offloaded()),
            UnitAllGather::PostForward => (UnitCollectiveKind::Parts, self.post_forward_group(), None),
        };
        let copy_in = offloaded.cloned().map(|offloaded| CopyIn { offloaded, label: call.label.clone() }.into());
        PendingAllGather::InFlight(self.exchange(exchange, group, call, members, shards), copy_in)
    }

    /// Returns this rank's shard of each unsharded parameter, over the post-forward group.
    pub(crate) fn split(&self, members: &[usize], unsharded: &[DispatchTensor]) -> Vec<DispatchTensor> {
        let group = self.post_forward_group().group();
        let part = |(&member, full): (&usize, &DispatchTensor)| match &self.params[member].sharding {
            None => full.clone(),
            Some((dim, sizes)) => copy_range(full, *dim, post_forward_sizes(sizes).range(group.size(), group.rank())),
        };
        members.iter().zip(unsharded).map(part).collect()
    }

    fn post_forward_group(&self) -> &Communicator {
        self.data().post_forward_group.as_ref().expect("post-forward shards exist only with a post-forward group")
    }
}

/// Returns the metadata of the full tensors of which these are the metadata of shards, with their shardings. Full
/// tensors, whose metadata does not change, are accepted too.
fn full_metas(
    metas: impl Iterator<Item = TensorMeta>,
    shardings: impl Iterator<Item = (usize, ShardSizes)>,
) -> Vec<(TensorMeta, usize, ShardSizes)> {
    let full = |(mut meta, (dim, sizes)): (TensorMeta, (usize, ShardSizes))| {
        meta.shape[dim] = sizes.total();
        (meta, dim, sizes)
    };
    metas.zip_eq(shardings).map(full).collect()
}

fn is_of(exchange: UnitCollectiveKind, param: &UnitParam) -> bool {
    match exchange {
        UnitCollectiveKind::Shards | UnitCollectiveKind::Parts | UnitCollectiveKind::Gradients => {
            param.sharding.is_some()
        }
        UnitCollectiveKind::ReplicatedGradients => param.sharding.is_none(),
        UnitCollectiveKind::All => true,
    }
}

/// Returns the shard sizes of a parameter over the ranks of
/// [`ReshardAfterForward::Ranks`](super::ReshardAfterForward::Ranks). They are even, also if the shards from which
/// the parameter was gathered are uneven.
pub(crate) fn post_forward_sizes(sharding: &ShardSizes) -> ShardSizes {
    ShardSizes::Chunked(sharding.total())
}

/// Copies `range` of dimension `dim`.
fn copy_range(tensor: &DispatchTensor, dim: usize, range: Range<usize>) -> DispatchTensor {
    let mut slices: Vec<_> = tensor.shape().iter().map(|&len| Slice::from(0..len)).collect();
    slices[dim] = Slice::from(range);
    own(Dispatch::float_slice(tensor.clone(), &slices))
}

/// Kind of a unit's collective on the tensors of some of its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnitCollectiveKind {
    /// All-gather of the shards of the sharded parameters.
    Shards,
    /// All-gather of the shards that the ranks of a post-forward group keep after forward.
    Parts,
    /// Reduce-scatter of the gradients of the sharded parameters, with a row of flags for each rank.
    Gradients,
    /// All-reduce of the gradients of replicated parameters, with flags.
    ReplicatedGradients,
    /// All-reduce of this rank's reduced gradients of all parameters over the replicas (HSDP), with flags.
    All,
}

/// All-gather of a unit's parameters.
#[derive(Debug, Clone, Copy)]
pub(crate) enum UnitAllGather {
    /// From the shards, for forward.
    Forward,
    /// From the shards, for backward: on a separate sequence of collectives.
    Backward,
    /// From the shards of the post-forward group that [`Unit::split`] made, which are on the device on which the ranks
    /// compute.
    PostForward,
}

/// The cached plans of a unit.
#[derive(Debug, Default)]
pub(crate) struct PlanCache(Mutex<SmallVec<[CachedPlan; 3]>>);

/// The plan of one collective of some parameters.
#[derive(Debug, Clone)]
pub(crate) struct CachedPlan {
    pub exchange: UnitCollectiveKind,
    pub members: Arc<[usize]>,
    /// Names of the parameters whose tensors the collective transfers.
    pub names: Arc<[Arc<str>]>,
    pub plan: Arc<CollectivePlan>,
}

/// Maximum number of plans in the cache of a unit. A step needs at most five for one set of parameters.
const MAX_PLANS: usize = 16;

impl PlanCache {
    /// Returns the cached plan of this collective for tensors of these dtypes, if there is one.
    pub fn find(
        &self,
        exchange: UnitCollectiveKind,
        members: &[usize],
        dtypes: impl Iterator<Item = DType> + Clone,
    ) -> Option<CachedPlan> {
        let is_this = |known: &&CachedPlan| {
            known.exchange == exchange && *known.members == *members && known.plan.dtypes().eq(dtypes.clone())
        };
        self.0.lock().iter().find(is_this).cloned()
    }

    /// Drops all plans, so that the next collectives make new ones.
    pub fn forget(&self) {
        self.0.lock().clear();
    }

    pub fn keep(&self, known: CachedPlan) {
        let mut plans = self.0.lock();
        if plans.len() == MAX_PLANS {
            plans.clear();
        }
        plans.push(known);
    }
}

/// The result of an all-gather: complete, or in flight.
#[derive(Debug)]
pub(crate) enum PendingAllGather {
    /// The all-gather is in flight. If the shards are in host memory, the second field describes how the result is
    /// copied to the device.
    InFlight(Work<Vec<DispatchTensor>>, Option<Box<CopyIn>>),
    Done(GatheredTensors),
}

/// Copy of a unit's gathered parameters from host memory to the device on which its ranks compute.
#[derive(Debug)]
pub(crate) struct CopyIn {
    pub(crate) offloaded: CpuOffload,
    pub(crate) label: Arc<str>,
}

/// Gathered parameters, with the timing of their all-gather if the caller's request is the one that transferred
/// them.
pub(crate) type GatheredTensors = (Vec<DispatchTensor>, Option<OpTiming>);

impl PendingAllGather {
    /// Starts the data transfer of a deferred all-gather.
    pub(crate) fn start(&mut self) {
        if let Self::InFlight(work, _) = self {
            work.start();
        }
    }

    /// Returns true if waiting would not block on other ranks.
    pub(crate) fn is_complete(&self) -> bool {
        match self {
            Self::InFlight(work, _) => work.is_complete(),
            Self::Done(_) => true,
        }
    }

    /// Returns true if it is an all-gather.
    pub(crate) fn is_under_way(&self) -> bool {
        matches!(self, Self::InFlight(..))
    }

    /// Waits for the all-gather, and keeps its result.
    pub(crate) fn complete(&mut self) -> Result<(), CommError> {
        *self = Self::Done(mem::replace(self, Self::Done((Vec::new(), None))).wait()?);
        Ok(())
    }

    pub(crate) fn wait(self) -> Result<GatheredTensors, CommError> {
        match self {
            Self::InFlight(work, copy_in) => {
                let (unsharded, course) = work.wait_with_timing()?;
                let unsharded = match copy_in {
                    Some(copy_in) => copy_in.offloaded.copy_in(&copy_in.label, unsharded),
                    None => unsharded,
                };
                Ok((unsharded, course))
            }
            Self::Done(unsharded) => Ok(unsharded),
        }
    }

    /// Returns the same all-gather without the copy to the device: the gathered parameters stay in the memory in
    /// which the shards are.
    pub(crate) fn in_separate_memory(self) -> Self {
        match self {
            Self::InFlight(work, _) => Self::InFlight(work, None),
            done @ Self::Done(_) => done,
        }
    }
}
