//! [`ShardGatherer`]: where the weights of one pass come from, in forward and again in backward.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device};

use super::gathered::UnshardState;
use super::shared::FreedBy;
use super::slots::{Refill, Storage};
use crate::comm::{Call, CommError, Op, Phase};
use crate::error::OrUnwind;
use crate::memory;
use crate::param::events::{EventKind, ShardedState, TrainingState, done, happened};
use crate::param::offload::CpuOffload;
use crate::param::pending_all_gather::{GatheredTensors, Keeps, PendingAllGather};
use crate::param::replica_check::{CheckedPass, PendingDigests};
use crate::param::unit::Unit;

/// The shards that a pass started from, and what is gathered of them.
///
/// The all-gather for backward is issued when forward leaves the unit (rule 9 of
/// [`graph`](crate::param::backward_nodes)): so backward may take results in any order, or never. Nothing moves until a
/// result is taken.
///
/// Views of a slot hold the source: a weight that outlives its pass can still be read.
#[derive(Debug)]
pub(in super::super) struct ShardGatherer {
    pub(super) unit: Arc<Unit>,
    /// The unit's parameters that take part, as indices into the unit.
    pub(super) members: Vec<usize>,
    /// As they are stored.
    pub(super) shards: Vec<DispatchTensor>,
    /// Whether its weights are in the element types that they are stored in, whatever they are computed with in.
    stored: bool,
    /// What the pass's collectives are called.
    call: Call,
    /// If what is alike on several ranks is compared.
    pub(super) due: Option<CheckedPass>,
    pub(super) gathered: UnshardState<PendingAllGather, dyn Storage, DispatchTensor>,
    /// Whether the all-gather for backward is wanted.
    started: AtomicBool,
    /// What fills its slots again, if passes share them.
    shared: OnceLock<Weak<FreedBy>>,
}

impl ShardGatherer {
    /// Of the parameters `members` of a unit, of which this rank has these `shards`. The weights are in the element
    /// types that they are `stored` in, or else those that they are computed with in. Collectives are called `call`;
    /// what is alike on several ranks is compared if it is `due`.
    pub(in super::super) fn new(
        unit: Arc<Unit>,
        members: Vec<usize>,
        shards: Vec<DispatchTensor>,
        stored: bool,
        call: Call,
        due: Option<CheckedPass>,
    ) -> Arc<Self> {
        let (gathered, started, shared) = (UnshardState::new(), AtomicBool::new(false), OnceLock::new());
        Arc::new(Self { unit, members, shards, stored, call, due, gathered, started, shared })
    }

    pub(in super::super) fn unit(&self) -> &Arc<Unit> {
        &self.unit
    }

    pub(in super::super) fn members(&self) -> &[usize] {
        &self.members
    }

    /// The stored shard at `position`.
    pub(in super::super) fn shard(&self, position: usize) -> &DispatchTensor {
        &self.shards[position]
    }

    /// The element type in which gradients of the weight at `position` are added up.
    pub(in super::super) fn added_in(&self, position: usize) -> DType {
        self.unit.precision().reduce.unwrap_or_else(|| self.shards[position].dtype())
    }

    /// Returns what the reduction of the pass compares.
    pub(in super::super) fn carried(&self) -> PendingDigests {
        self.unit.carried(self.due.as_ref(), &self.members, &self.shards)
    }

    /// Its slots are those of other passes, too.
    pub(super) fn shares(&self, freed_by: &Arc<FreedBy>) {
        let _ = self.shared.set(Arc::downgrade(freed_by));
    }

    /// The shards, of which those that are cut (or else the others) are in the element types of the weights.
    fn sent(&self, sharding: bool) -> Vec<DispatchTensor> {
        let shards = self.shards.clone();
        if self.stored { shards } else { self.unit.computed(sharding, &self.members, shards) }
    }

    /// The element type of the weight at `position`.
    pub(super) fn dtype(&self, position: usize) -> DType {
        let shard = &self.shards[position];
        if self.stored { shard.dtype() } else { self.unit.computed_dtype(self.members[position], shard) }
    }

    /// Whether the weight at `position` is the stored shard itself: every rank holds it whole. Then there is nothing
    /// to free.
    pub(super) fn is_shard(&self, position: usize) -> bool {
        let is_sharded = self.unit.params[self.members[position]].sharding.is_some();
        !is_sharded && self.offloaded().is_none() && self.dtype(position) == self.shards[position].dtype()
    }

    /// How weights come to where the rank computes, if the shards are in host memory. Weights as they are stored stay
    /// with the shards.
    pub(super) fn offloaded(&self) -> Option<&CpuOffload> {
        self.unit.offloaded().filter(|_| !self.stored)
    }

    /// How reduced gradients come to the shards, if those are in host memory: who has moved the model by hand has them
    /// elsewhere.
    pub(in super::super) fn copied_out(&self) -> Option<CpuOffload> {
        let is_on_host = |shard: &DispatchTensor| memory::is_host(&Device::new(shard.device()));
        self.offloaded().filter(|_| self.shards.iter().all(is_on_host)).cloned()
    }

    /// Where the rank computes.
    pub(in super::super) fn device(&self, position: usize) -> DispatchDevice {
        let of_shard = || self.shards[position].device();
        self.offloaded().map_or_else(of_shard, |offloaded| offloaded.device().as_dispatch().clone())
    }

    pub(in super::super) fn call(&self, phase: Phase) -> Call {
        self.call.clone().with_phase(phase)
    }

    /// Whether its ranks have parts of weights.
    fn is_sharded(&self) -> bool {
        self.unit.is_of_several() && self.members.iter().any(|&member| self.unit.params[member].sharding.is_some())
    }

    /// Something happens to the weights, if they are not the shards.
    pub(super) fn happened(&self, kind: EventKind, during: TrainingState, state: ShardedState) {
        if self.offloaded().is_some() || self.is_sharded() {
            happened(kind, || self.unit.label(), during, || state);
        }
    }

    /// The weights for forward.
    pub(super) fn gather(&self) -> Result<Vec<DispatchTensor>, CommError> {
        self.happened(EventKind::Unshard, TrainingState::Forward, ShardedState::Unsharded);
        let gathering = self.unit.all_gather(self.call(Phase::Forward), &self.members, self.sent(true));
        let gathering = if self.stored { gathering.in_separate_memory() } else { gathering };
        self.gathered_in(TrainingState::Forward, gathering)
    }

    /// Every weight of the pass, once `gathering` is there.
    pub(super) fn gathered_in(
        &self,
        during: TrainingState,
        gathering: PendingAllGather,
    ) -> Result<Vec<DispatchTensor>, CommError> {
        Ok(self.unsharded(during, gathering.wait()?))
    }

    /// Has the all-gather for backward begin, if it has not.
    pub(super) fn start(&self) {
        let starts = self.gathered.issued(|issued| {
            issued.start();
            !self.started.swap(true, Relaxed)
        });
        if starts == Some(true) {
            self.happened(EventKind::Unshard, TrainingState::PreBackward, ShardedState::Unsharded);
        }
    }

    /// Whether [`start`](Self::start) has something to do.
    pub(super) fn is_to_start(&self) -> bool {
        !self.started.load(Relaxed) && self.gathered.issued(|_| ()).is_some()
    }

    /// Whether what was [started](Self::start) is there, and not taken.
    pub(super) fn is_there(&self) -> bool {
        self.started.load(Relaxed) && self.gathered.issued(|issued| issued.is_complete()) == Some(true)
    }

    /// Every weight of the pass, of what was gathered for backward.
    fn gather_again(&self, gathering: PendingAllGather) -> Vec<DispatchTensor> {
        if !self.started.swap(true, Relaxed) {
            self.happened(EventKind::Unshard, TrainingState::PreBackward, ShardedState::Unsharded);
        }
        self.gathered_in(TrainingState::PreBackward, gathering).or_unwind()
    }

    /// Every weight of the pass, of what was gathered.
    pub(super) fn unsharded(&self, during: TrainingState, (gathered, course): GatheredTensors) -> Vec<DispatchTensor> {
        let replicated = self.unit.replicated_of(&self.members, self.sent(false));
        let replicated = match self.offloaded() {
            Some(offloaded) => offloaded.copy_in(&self.call.label, replicated),
            None => replicated,
        };
        let unsharded = self.unit.merge(&self.members, gathered, replicated);
        if self.is_sharded() {
            done(Op::AllGather, || self.unit.label(), during, ShardedState::Unsharded, course);
        }
        unsharded
    }

    /// Issues the all-gather for backward: of `parts`, the shards over a few ranks, or else of the
    /// shards over all.
    pub(super) fn post_all_gather(&self, parts: Option<Vec<DispatchTensor>>) -> PendingAllGather {
        let call = self.call(Phase::Backward).with_deferred();
        match parts {
            Some(parts) => self.unit.all_gather_parts(call, &self.members, parts),
            None => self.unit.all_gather_again(call, &self.members, self.sent(true)),
        }
    }

    /// The weight at `position`, gathered for backward: see [`UnshardState::again`].
    pub(super) fn again(&self, position: usize, shared: bool) -> Option<DispatchTensor> {
        self.gathered.again(position, shared, |issued| self.gather_again(issued), Storage::fill)
    }
}

impl Keeps for ShardGatherer {
    fn reshard(self: Arc<Self>) {
        let issue = || {
            self.happened(EventKind::Reshard, TrainingState::Idle, ShardedState::Sharded);
            if let Some(freed_by) = self.shared.get().and_then(Weak::upgrade) {
                freed_by.add(self.clone());
            }
            self.post_all_gather(None)
        };
        self.gathered.reshard(issue, Storage::release);
    }
}

impl Refill for ShardGatherer {
    fn refill(&self) {
        self.gathered.refill(|issued| self.gather_again(issued), Storage::fill);
    }
}
