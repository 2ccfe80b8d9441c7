//! The collectives of a unit, executed by plans that the unit keeps, and the [`PendingAllGather`]
//! of its parameters.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Slice;
use itertools::Itertools;
use parking_lot::Mutex;

use super::offload::CpuOffload;
use super::unit::{Unit, UnitParam};
use crate::comm::{
    Call, CollectivePlan, CommError, Communicator, OpTiming, Phase, ShardedModel, TensorMeta, Work,
};
use crate::dtensor::own;
use crate::placement::ShardSizes;

impl Unit {
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
        let (group, number) = self.group(kind, call.phase);
        match self.plan(kind, group, members, &tensors) {
            Ok(CachedPlan { names, plan, .. }) => {
                let model = call.model.map(|model| ShardedModel { number, ..model });
                let call = Call {
                    names: Some(names),
                    model,
                    ..call
                };
                let Some(custom) = self.control.lock().collectives.clone() else {
                    return group.execute_plan(call, &plan, tensors);
                };
                match kind {
                    UnitCollectiveKind::Shards | UnitCollectiveKind::Parts => {
                        custom.all_gather(group, call, &plan, tensors)
                    }
                    UnitCollectiveKind::Gradients => {
                        custom.reduce_scatter(group, call, &plan, tensors)
                    }
                    UnitCollectiveKind::ReplicatedGradients | UnitCollectiveKind::All => {
                        custom.all_reduce(group, call, &plan, tensors)
                    }
                }
            }
            Err(error) => Work::failed(error),
        }
    }

    /// Returns the ranks that participate in a collective of this kind, and the number of the
    /// unit's model among theirs. The all-gathers of backward are a separate sequence.
    fn group(&self, kind: UnitCollectiveKind, phase: Phase) -> (&Communicator, u64) {
        let data = self.data();
        match kind {
            UnitCollectiveKind::Shards if phase == Phase::Backward => {
                (&data.again, data.model.shard)
            }
            UnitCollectiveKind::Shards => (&data.shard, data.model.shard),
            UnitCollectiveKind::Parts => (self.post_forward_group(), data.model.post_forward_group),
            UnitCollectiveKind::Gradients | UnitCollectiveKind::ReplicatedGradients => {
                (&data.reduce, data.model.shard)
            }
            UnitCollectiveKind::All => (
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
        let is_this = |known: &&CachedPlan| {
            let is_same = known.kind == kind && *known.members == *members;
            is_same
                && known
                    .plan
                    .dtypes()
                    .eq(tensors.iter().map(DispatchTensor::dtype))
        };
        if let Some(known) = self.plans.lock().iter().find(is_this) {
            return Ok(known.clone());
        }
        let is_sent = |param: &&UnitParam| match kind {
            UnitCollectiveKind::Shards
            | UnitCollectiveKind::Parts
            | UnitCollectiveKind::Gradients => param.is_sharded(),
            UnitCollectiveKind::ReplicatedGradients => !param.is_sharded(),
            UnitCollectiveKind::All => true,
        };
        let params = members
            .iter()
            .map(|&member| &self.params[member])
            .filter(is_sent);
        let names = params.clone().map(|param| param.path.clone()).collect();
        let metas = tensors.iter().map(|tensor| TensorMeta {
            shape: tensor.shape(),
            dtype: tensor.dtype(),
        });
        let shardings = params.filter_map(UnitParam::sharding);
        let plan = match kind {
            UnitCollectiveKind::Shards => group.plan_all_gather(full_metas(metas, shardings)),
            UnitCollectiveKind::Parts => {
                let shardings = shardings.map(|(dim, sizes)| (dim, post_forward_sizes(&sizes)));
                group.plan_all_gather(full_metas(metas, shardings))
            }
            UnitCollectiveKind::Gradients => {
                let flags = (0, ShardSizes::Chunked(group.group().size()));
                group.plan_reduce_scatter(
                    full_metas(metas, shardings.chain([flags])),
                    self.averaging().shard,
                )
            }
            UnitCollectiveKind::ReplicatedGradients => {
                group.plan_all_reduce(&metas.collect_vec(), self.averaging().shard)
            }
            UnitCollectiveKind::All => {
                group.plan_all_reduce(&metas.collect_vec(), self.averaging().replicate)
            }
        };
        let known = CachedPlan {
            kind,
            members: members.into(),
            names,
            plan: plan?,
        };
        let mut plans = self.plans.lock();
        if plans.len() == MAX_PLANS {
            plans.clear();
        }
        plans.push(known.clone());
        Ok(known)
    }

    /// Starts an all-gather of the parameters at `members` from this rank's shards. The result is
    /// copied to the device as `offloaded` says, if the shards are in host memory.
    ///
    /// The result is in the order of `members`, without those that every rank replicates.
    pub(crate) fn all_gather(
        &self,
        kind: UnitCollectiveKind,
        call: Call,
        members: &[usize],
        shards: Vec<DispatchTensor>,
        offloaded: Option<&CpuOffload>,
    ) -> PendingAllGather {
        let shards = self.select(true, members, shards);
        if shards.is_empty() {
            return PendingAllGather::Done((Vec::new(), None));
        }
        let copy_in = offloaded.map(|offloaded| (offloaded.clone(), call.label.clone()).into());
        PendingAllGather::InFlight(self.exchange(kind, call, members, shards), copy_in)
    }

    /// Returns this rank's shard of each unsharded parameter, over the post-forward group.
    pub(crate) fn split(
        &self,
        members: &[usize],
        unsharded: &[DispatchTensor],
    ) -> Vec<DispatchTensor> {
        let group = self.post_forward_group().group();
        let part = |(&member, full): (&usize, &DispatchTensor)| match self.params[member].sharding()
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
        self.data()
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
    let full = |(mut meta, (dim, sizes)): (TensorMeta, (usize, ShardSizes))| {
        meta.shape[dim] = sizes.total();
        (meta, dim, sizes)
    };
    metas.zip_eq(shardings).map(full).collect()
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
    Shards,
    /// All-gather of the shards that the ranks of a post-forward group keep after forward: those
    /// that [`Unit::split`] made, on the device on which the ranks compute.
    Parts,
    /// Reduce-scatter of the gradients of the sharded parameters, with a row of flags for each
    /// rank.
    Gradients,
    /// All-reduce of the gradients of replicated parameters, with flags.
    ReplicatedGradients,
    /// All-reduce of this rank's reduced gradients of all parameters over the replicas (HSDP), with
    /// flags.
    All,
}

/// The plan of one collective of some parameters.
#[derive(Debug, Clone)]
pub(crate) struct CachedPlan {
    kind: UnitCollectiveKind,
    members: Arc<[usize]>,
    /// Names of the parameters whose tensors the collective transfers.
    names: Arc<[Arc<str>]>,
    plan: Arc<CollectivePlan>,
}

/// Maximum number of plans in the cache of a unit. A step needs at most five for one set of
/// parameters.
const MAX_PLANS: usize = 16;

/// The result of an all-gather: complete, or in flight.
#[derive(Debug)]
pub(crate) enum PendingAllGather {
    /// The all-gather is in flight. If the shards are in host memory, the second field describes
    /// how the result is copied to the device.
    InFlight(
        Work<Vec<DispatchTensor>>,
        Option<Box<(CpuOffload, Arc<str>)>>,
    ),
    Done(GatheredTensors),
    /// Several copies of the parameters are restored from it.
    Shared(Arc<Mutex<PendingAllGather>>),
}

/// Gathered parameters, with the timing of their all-gather if the caller's request is the one that
/// transferred them.
pub(crate) type GatheredTensors = (Vec<DispatchTensor>, Option<OpTiming>);

impl PendingAllGather {
    /// Starts the data transfer of a deferred all-gather.
    pub(crate) fn start(&mut self) {
        match self {
            Self::InFlight(work, _) => work.start(),
            Self::Done(_) => {}
            Self::Shared(shared) => shared.lock().start(),
        }
    }

    /// Returns true if waiting would not block on other ranks.
    pub(crate) fn is_complete(&self) -> bool {
        match self {
            Self::InFlight(work, _) => work.is_complete(),
            Self::Done(_) => true,
            Self::Shared(shared) => shared.lock().is_complete(),
        }
    }

    /// Returns true if it is an all-gather.
    pub(crate) fn is_under_way(&self) -> bool {
        matches!(self, Self::InFlight(..))
    }

    /// Makes it one whose result several copies can use: see [`share`](Self::share).
    pub(crate) fn shared(gathering: Self) -> Self {
        Self::Shared(Arc::new(Mutex::new(gathering)))
    }

    /// Returns another handle of a [shared](Self::shared) all-gather. The last handle that waits
    /// takes the result.
    pub(crate) fn share(&self) -> Self {
        match self {
            Self::Shared(shared) => Self::Shared(shared.clone()),
            _ => unreachable!("only a shared all-gather has several handles"),
        }
    }

    /// Waits for the all-gather, and keeps its result.
    pub(crate) fn complete(&mut self) -> Result<(), CommError> {
        *self = Self::Done(mem::replace(self, Self::Done((Vec::new(), None))).wait()?);
        Ok(())
    }

    pub(crate) fn wait(self) -> Result<GatheredTensors, CommError> {
        match self {
            Self::InFlight(work, copy_in) => {
                let (unsharded, timing) = work.wait_with_timing()?;
                let unsharded = match copy_in.as_deref() {
                    Some((offloaded, label)) => offloaded.copy_in(label, unsharded),
                    None => unsharded,
                };
                Ok((unsharded, timing))
            }
            Self::Done(unsharded) => Ok(unsharded),
            Self::Shared(shared) => match Arc::try_unwrap(shared) {
                Ok(last) => last.into_inner().wait(),
                Err(shared) => {
                    let mut gathering = shared.lock();
                    let result =
                        mem::replace(&mut *gathering, Self::Done((Vec::new(), None))).wait();
                    *gathering = match &result {
                        Ok((unsharded, _)) => Self::Done((unsharded.clone(), None)),
                        Err(error) => Self::InFlight(Work::failed(error.clone()), None),
                    };
                    result
                }
            },
        }
    }
}
