//! [`ShardGatherer`]: gathers the weights of one pass from their shards, for forward and for backward.

use std::sync::Arc;

use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device};

use super::copies::Regather;
use crate::Error;
use crate::comm::{Call, CommError, Op, Phase};
use crate::error::OrUnwind;
use crate::memory;
use crate::param::ParamError;
use crate::param::collectives::{GatheredTensors, PendingAllGather, UnitAllGather};
use crate::param::events::{EventKind, ShardedState, TrainingState, done, happened};
use crate::param::offload::CpuOffload;
use crate::param::replica_check::{CheckedPass, PendingDigests};
use crate::param::unit::Unit;

/// The shards from which a pass started, and the calls that gather them.
#[derive(Debug)]
pub(crate) struct ShardGatherer {
    pub(super) unit: Arc<Unit>,
    /// The unit's parameters that participate, as indices into the unit.
    pub(super) members: Vec<usize>,
    /// The shards, in the element types in which they are stored.
    pub(super) shards: Vec<DispatchTensor>,
    /// True if the weights have the element types in which they are stored, instead of those used for computation.
    stored: bool,
    /// Signature of the pass's collectives, without the phase.
    call: Call,
    /// The pass that the replica check compares, if it is due in this pass.
    pub(super) due: Option<CheckedPass>,
}

impl ShardGatherer {
    /// Creates a gatherer for the parameters `members` of a unit, of which this rank has these `shards`. If
    /// `stored`, the weights have the element types in which they are stored, otherwise those used for computation.
    /// Collectives are posted as `call`. If the replica check is `due`, replicated values are compared.
    pub(crate) fn new(
        unit: Arc<Unit>,
        members: Vec<usize>,
        shards: Vec<DispatchTensor>,
        stored: bool,
        call: Call,
        due: Option<CheckedPass>,
    ) -> Arc<Self> {
        Arc::new(Self { unit, members, shards, stored, call, due })
    }

    pub(crate) fn unit(&self) -> &Arc<Unit> {
        &self.unit
    }

    pub(crate) fn members(&self) -> &[usize] {
        &self.members
    }

    /// Returns the stored shard at `position`.
    pub(crate) fn shard(&self, position: usize) -> &DispatchTensor {
        &self.shards[position]
    }

    /// Returns the element type in which gradients of the weight at `position` are summed.
    pub(crate) fn added_in(&self, position: usize) -> DType {
        self.unit.precision().reduce.unwrap_or_else(|| self.shards[position].dtype())
    }

    /// Returns the digests that the reduction of the pass compares.
    pub(crate) fn carried(&self) -> PendingDigests {
        self.unit.carried(self.due.as_ref(), &self.members, &self.shards)
    }

    /// Returns the shards, converting either the sharded ones (if `sharding`) or the others to the element types of
    /// the weights.
    fn sent(&self, sharding: bool) -> Vec<DispatchTensor> {
        let shards = self.shards.clone();
        if self.stored { shards } else { self.unit.computed(sharding, &self.members, shards) }
    }

    /// Returns the element type of the weight at `position`.
    pub(super) fn dtype(&self, position: usize) -> DType {
        let shard = &self.shards[position];
        if self.stored { shard.dtype() } else { self.unit.computed_dtype(self.members[position], shard) }
    }

    /// Returns true if the weight at `position` is the stored shard itself, because every rank holds the full
    /// parameter. There is then nothing to free.
    pub(super) fn is_shard(&self, position: usize) -> bool {
        let is_sharded = self.unit.params[self.members[position]].sharding.is_some();
        !is_sharded && self.offloaded().is_none() && self.dtype(position) == self.shards[position].dtype()
    }

    /// Returns the copies between host shards and the device, if the shards are in host memory. Weights in stored
    /// element types stay where the shards are.
    pub(super) fn offloaded(&self) -> Option<&CpuOffload> {
        self.unit.offloaded().filter(|_| !self.stored)
    }

    /// Returns the copies of reduced gradients to the shards, if those are in host memory. If the program moved the
    /// model to another device, they are not.
    pub(crate) fn copied_out(&self) -> Option<CpuOffload> {
        let is_on_host = |shard: &DispatchTensor| memory::is_host(&Device::new(shard.device()));
        self.offloaded().filter(|_| self.shards.iter().all(is_on_host)).cloned()
    }

    /// Returns the device on which the rank computes.
    pub(crate) fn device(&self, position: usize) -> DispatchDevice {
        let of_shard = || self.shards[position].device();
        self.offloaded().map_or_else(of_shard, |offloaded| offloaded.device().as_dispatch().clone())
    }

    pub(crate) fn call(&self, phase: Phase) -> Call {
        self.call.clone().with_phase(phase)
    }

    /// Returns true if its ranks hold shards of at least one weight.
    fn is_sharded(&self) -> bool {
        self.unit.is_of_several() && self.members.iter().any(|&member| self.unit.params[member].sharding.is_some())
    }

    /// Records an event, unless the weights are the stored shards themselves.
    pub(super) fn happened(&self, kind: EventKind, during: TrainingState, state: ShardedState) {
        if self.offloaded().is_some() || self.is_sharded() {
            happened(kind, || self.unit.label(), during, || state);
        }
    }

    /// Gathers the weights for forward.
    pub(super) fn gather(&self) -> Result<Vec<DispatchTensor>, CommError> {
        self.happened(EventKind::Unshard, TrainingState::Forward, ShardedState::Unsharded);
        let gathering =
            self.unit.all_gather(UnitAllGather::Forward, self.call(Phase::Forward), &self.members, self.sent(true));
        let gathering = if self.stored { gathering.in_separate_memory() } else { gathering };
        self.gathered_in(TrainingState::Forward, gathering)
    }

    /// Waits for `gathering` and returns every weight of the pass.
    pub(super) fn gathered_in(
        &self,
        during: TrainingState,
        gathering: PendingAllGather,
    ) -> Result<Vec<DispatchTensor>, CommError> {
        Ok(self.unsharded(during, gathering.wait()?))
    }

    /// Assembles every weight of the pass from the gathered shards and the replicated parameters.
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

    /// Issues the all-gather for backward: of `parts` (the shards over a few ranks) if present, otherwise of the
    /// shards over all ranks.
    pub(super) fn post_all_gather(&self, parts: Option<Vec<DispatchTensor>>) -> PendingAllGather {
        let call = self.call(Phase::Backward).with_deferred();
        match parts {
            Some(parts) => self.unit.all_gather(UnitAllGather::PostForward, call, &self.members, parts),
            None => self.unit.all_gather(UnitAllGather::Backward, call, &self.members, self.sent(true)),
        }
    }

    /// Records that the data transfer of the all-gather for backward starts.
    pub(super) fn note_start(&self) {
        self.happened(EventKind::Unshard, TrainingState::PreBackward, ShardedState::Unsharded);
    }
}

impl Regather for ShardGatherer {
    fn post_again(&self) -> PendingAllGather {
        self.happened(EventKind::Reshard, TrainingState::Idle, ShardedState::Sharded);
        self.post_all_gather(None)
    }

    fn wait_again(&self, gathering: PendingAllGather, is_started: bool) -> Vec<DispatchTensor> {
        if !is_started {
            self.note_start();
        }
        self.gathered_in(TrainingState::PreBackward, gathering).or_unwind()
    }

    fn refuse(&self) -> ! {
        Error::from(ParamError::NotUnsharded { unit: self.unit.label().to_string() }).unwind()
    }
}
