//! [`Source`]: where the weights of one pass come from, in forward and again in backward.

use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::storage::{Ahead, Refill, Slot};
use super::unit::{Gathering, Unit};
use crate::Error;
use crate::comm::{Call, Phase};

/// The shards that a pass started from, and the all-gather that backward will read.
///
/// That all-gather is issued when forward leaves the unit, where all ranks come by in one order,
/// and on a sequence of its own: so backward may take results in any order, or never, and no gather
/// waits for a reduction. Nothing moves until a result is taken.
///
/// Views of a slot hold the source, and it holds no slot: a weight that outlives its pass can still
/// be read.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) unit: Arc<Unit>,
    /// The unit's parameters that take part, as indices into the unit.
    pub(super) members: Vec<usize>,
    pub(super) shards: Vec<DispatchTensor>,
    /// What the pass's collectives are called.
    call: Call,
    ahead: Ahead<Gathering, Slot, DispatchTensor>,
}

impl Source {
    pub(super) fn new(unit: Arc<Unit>, members: Vec<usize>, shards: Vec<DispatchTensor>, call: Call) -> Arc<Self> {
        Arc::new(Self { unit, members, shards, call, ahead: Ahead::new() })
    }

    pub(super) fn call(&self, phase: Phase) -> Call {
        self.call.clone().in_phase(phase)
    }

    /// The weights for forward.
    pub(super) fn gather(&self) -> Vec<DispatchTensor> {
        let gathering = self.unit.all_gather(self.call(Phase::Forward), &self.members, self.shards.clone());
        self.wholes(gathering)
    }

    /// Every weight of the pass, once `gathering` is there.
    pub(super) fn wholes(&self, gathering: Gathering) -> Vec<DispatchTensor> {
        let gathered = gathering.wait().unwrap_or_else(|error| Error::from(error).unwind());
        self.unit.wholes(&self.members, gathered, &self.shards)
    }

    /// The slots to fill.
    pub(super) fn fills(&self, slots: &[Option<Arc<Slot>>]) {
        self.ahead.fills(slots);
    }

    /// Issues the all-gather for backward: of `parts`, the shards over a few ranks, or else of the
    /// shards over all.
    pub(super) fn gather_ahead(&self, parts: Option<Vec<DispatchTensor>>) -> Gathering {
        let call = self.call(Phase::Backward).ahead();
        match parts {
            Some(parts) => self.unit.all_gather_parts(call, &self.members, parts),
            None => self.unit.all_gather_again(call, &self.members, self.shards.clone()),
        }
    }

    /// Forward is over: backward reads what `ahead` gathers, and what forward gathered goes.
    pub(super) fn leave(&self, ahead: Option<Gathering>, slots: &[Option<Arc<Slot>>]) {
        self.ahead.leave(ahead, slots, Slot::release);
    }

    /// Takes the result of the all-gather for backward, once. Every slot is full then.
    pub(super) fn take(&self) {
        self.ahead.take(|ahead| self.wholes(ahead), Slot::fill);
    }

    /// The weight at `position`, gathered again, of those in no slot.
    pub(super) fn again(&self, position: usize) -> Option<DispatchTensor> {
        self.ahead.again(position)
    }

    /// [`again`](Self::again), given away.
    pub(super) fn take_again(&self, position: usize) -> Option<DispatchTensor> {
        self.ahead.take_again(position)
    }

    /// Drops what was gathered again and nobody holds.
    pub(super) fn forget(&self) {
        self.ahead.forget();
    }
}

impl Refill for Source {
    fn refill(&self) {
        self.take();
    }
}
