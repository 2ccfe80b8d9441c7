//! [`ShardGatherer`]: gathers the weights of one pass from their shards, for forward and for backward.

use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Shape};
use parking_lot::Mutex;

use crate::Error;
use crate::comm::{Call, CommError, Op, Phase};
use crate::error::OrUnwind;
use crate::memory;
use crate::param::ParamError;
use crate::param::events::{Event, EventKind, ShardedState, TrainingState, record};
use crate::param::offload::CpuOffload;
use crate::param::pending_all_gather::PendingAllGather;
use crate::param::replica_check::{CheckedPass, PendingDigests};
use crate::param::shard_codec::ShardCodec;
use crate::param::unit_comm::{UnitCollectiveKind, UnitComm};
use crate::param::unit_spec::UnitParam;

/// The shards from which a pass started, and the calls that gather them.
#[derive(Debug)]
pub(crate) struct ShardGatherer {
    pub(crate) comm: Arc<UnitComm>,
    /// The unit's parameters that participate, as indices into the unit.
    pub(crate) members: Arc<[usize]>,
    /// The shards, in the element types in which they are stored.
    pub(crate) shards: GatheredShards,
    /// True if the weights have the element types in which they are stored, instead of those used
    /// for computation.
    pub(crate) stored: bool,
    /// The codec of the pass's all-gathers.
    pub(crate) codec: Option<Arc<dyn ShardCodec>>,
    /// Signature of the pass's collectives, without the phase.
    pub(crate) call: Call,
    /// The pass that the replica check compares, if it is due in this pass.
    pub(crate) checked: Option<CheckedPass>,
}

/// The shards of a pass, until it [releases](ShardGatherer::release_shard) them.
#[derive(Debug)]
pub(crate) struct GatheredShards(Mutex<Vec<DispatchTensor>>);

impl From<Vec<DispatchTensor>> for GatheredShards {
    fn from(shards: Vec<DispatchTensor>) -> Self {
        Self(Mutex::new(shards))
    }
}

impl GatheredShards {
    /// Returns the shard at `position`.
    pub(crate) fn at(&self, position: usize) -> DispatchTensor {
        self.0.lock()[position].clone()
    }

    /// Returns all shards.
    pub(crate) fn all(&self) -> Vec<DispatchTensor> {
        self.0.lock().clone()
    }
}

impl ShardGatherer {
    /// Gives up the handle to a shard that is not gathered again. Zeros of its shape stand for it,
    /// which have no memory of their own. A replicated parameter is kept, since a late gather reads
    /// it.
    pub(crate) fn release_shard(&self, position: usize) {
        if !self.param(position).is_sharded() {
            return;
        }
        let shard = &mut self.shards.0.lock()[position];
        *shard = memory::placeholder(shard);
    }

    /// Returns the parameter at `position`.
    pub(crate) fn param(&self, position: usize) -> &UnitParam {
        &self.comm.spec.params[self.members[position]]
    }

    /// Returns the element type in which gradients of the weight at `position` are summed.
    pub(crate) fn added_in(&self, position: usize) -> DType {
        self.comm
            .spec
            .precision()
            .reduce
            .unwrap_or_else(|| self.shards.at(position).dtype())
    }

    /// Returns a zero gradient of this shape for the weight at `position`, or for a shard of it.
    pub(crate) fn zeros(&self, position: usize, shape: Shape) -> DispatchTensor {
        Dispatch::float_zeros(
            shape,
            &self.device(position),
            self.added_in(position).into(),
        )
    }

    /// Computes the digests of the gathered weights, if the pass is checked.
    pub(crate) fn digest_gathered(&self, weights: &[DispatchTensor]) {
        if let Some(checked) = &self.checked {
            self.comm
                .spec
                .digest_gathered(checked, &self.members, weights);
        }
    }

    /// Returns the digests that the reduction of the pass compares.
    pub(crate) fn pending_digests(&self) -> PendingDigests {
        self.comm
            .spec
            .pending_digests(self.checked.as_ref(), &self.members, &self.shards.all())
    }

    /// Returns the shards, converting either the sharded ones (if `sharding`) or the others to the
    /// element types of the weights.
    fn sent(&self, sharding: bool) -> Vec<DispatchTensor> {
        let shards = self.shards.all();
        if self.stored {
            shards
        } else {
            self.comm.spec.computed(sharding, &self.members, shards)
        }
    }

    /// Returns the element type of the weight at `position`.
    pub(crate) fn dtype(&self, position: usize) -> DType {
        let shard = &self.shards.at(position);
        if self.stored {
            shard.dtype()
        } else {
            self.comm.spec.computed_dtype(self.members[position], shard)
        }
    }

    /// Returns true if the weight at `position` is the stored shard itself, because every rank
    /// holds the full parameter. There is then nothing to free.
    pub(crate) fn is_shard(&self, position: usize) -> bool {
        !self.param(position).is_sharded()
            && self.offloaded().is_none()
            && self.dtype(position) == self.shards.at(position).dtype()
    }

    /// Returns the copies between host shards and the device, if the shards are in host memory.
    /// Weights in stored element types stay where the shards are.
    pub(crate) fn offloaded(&self) -> Option<&CpuOffload> {
        self.comm.spec.offloaded().filter(|_| !self.stored)
    }

    /// Returns the copies of reduced gradients to the shards, if those are in host memory. If the
    /// program moved the model to another device, they are not.
    pub(crate) fn copied_out(&self) -> Option<CpuOffload> {
        self.offloaded()
            .filter(|_| {
                let shards = self.shards.all();
                shards
                    .iter()
                    .all(|shard| memory::is_host(&Device::new(shard.device())))
            })
            .cloned()
    }

    /// Returns the device on which the rank computes.
    pub(crate) fn device(&self, position: usize) -> DispatchDevice {
        self.offloaded().map_or_else(
            || self.shards.at(position).device(),
            |offloaded| offloaded.device().as_dispatch().clone(),
        )
    }

    /// Returns true if the rank computes in host memory.
    pub(crate) fn is_on_host(&self) -> bool {
        self.members.is_empty() || memory::is_host(&Device::new(self.device(0)))
    }

    pub(crate) fn call(&self, phase: Phase) -> Call {
        self.call.clone().with_phase(phase)
    }

    /// Returns true if its ranks hold shards of at least one weight.
    fn is_sharded(&self) -> bool {
        self.comm.spec.is_of_several()
            && (0..self.members.len()).any(|at| self.param(at).is_sharded())
    }

    /// Records an event of a unit that has collectives: that is gathered, or reduced in buckets.
    pub(crate) fn record_event(&self, kind: EventKind, during: TrainingState, state: ShardedState) {
        let is_gathered = self.offloaded().is_some() || self.is_sharded();
        let of_weights = matches!(kind, EventKind::Unshard | EventKind::Reshard);
        if is_gathered || !of_weights && self.comm.spec.buckets().is_some() {
            record(|| Event::of(self.comm.label(), kind, during, state));
        }
    }

    /// Posts an all-gather of the shards over all ranks.
    pub(crate) fn post(&self, call: Call) -> PendingAllGather {
        self.comm.all_gather(
            UnitCollectiveKind::GatherShards,
            call,
            &self.members,
            self.sent(true),
            self.offloaded(),
            self.codec.clone(),
        )
    }

    /// Waits for `gathering`, and assembles every weight of the pass from its result and the
    /// replicated parameters.
    pub(crate) fn gathered_in(
        &self,
        during: TrainingState,
        gathering: PendingAllGather,
    ) -> Result<Vec<DispatchTensor>, CommError> {
        let (gathered, timing) = gathering.wait()?;
        let replicated = self
            .comm
            .spec
            .select(false, &self.members, self.sent(false));
        let replicated = match self.offloaded() {
            Some(offloaded) => offloaded.copy_in(&self.call.label, replicated),
            None => replicated,
        };
        let unsharded = self.comm.spec.merge(&self.members, gathered, replicated);
        if self.is_sharded() {
            let kind = EventKind::Done(Op::AllGather);
            record(|| Event {
                timing,
                ..Event::of(self.comm.label(), kind, during, ShardedState::Unsharded)
            });
        }
        Ok(unsharded)
    }

    /// Issues the all-gather for backward: of `parts` (the shards over a few ranks) if present,
    /// otherwise of the shards over all ranks.
    pub(crate) fn post_backward_gather(
        &self,
        parts: Option<Vec<DispatchTensor>>,
    ) -> PendingAllGather {
        let call = self.call(Phase::Backward).with_deferred();
        match parts {
            Some(parts) => self.comm.all_gather(
                UnitCollectiveKind::GatherParts,
                call,
                &self.members,
                parts,
                None,
                None,
            ),
            None => self.post(call),
        }
    }

    /// Records that the data transfer of the all-gather for backward starts.
    pub(crate) fn note_start(&self) {
        self.record_event(
            EventKind::Unshard,
            TrainingState::PreBackward,
            ShardedState::Unsharded,
        );
    }

    /// Posts the all-gather for backward of parameters that are freed by hand.
    pub(crate) fn post_after_reshard(&self) -> PendingAllGather {
        self.record_event(
            EventKind::Reshard,
            TrainingState::Idle,
            ShardedState::Sharded,
        );
        self.post_backward_gather(None)
    }

    /// Waits for the all-gather for backward, and returns every weight. `is_started` is true if its
    /// data transfer was started before.
    pub(crate) fn wait_for_backward(
        &self,
        gathering: PendingAllGather,
        is_started: bool,
    ) -> Vec<DispatchTensor> {
        if !is_started {
            self.note_start();
        }
        self.gathered_in(TrainingState::PreBackward, gathering)
            .or_unwind()
    }

    /// Unwinds with the error for a weight that backward does not gather.
    pub(crate) fn refuse(&self) -> ! {
        Error::from(ParamError::NotUnsharded {
            unit: self.comm.label().to_string(),
        })
        .unwind()
    }
}
