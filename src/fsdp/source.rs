//! [`Source`]: where the weights of one pass come from, in forward and again in backward.

use std::sync::{Arc, Weak};

use burn::backend::DispatchTensor;
use parking_lot::Mutex;

use super::storage::{Refill, Slot};
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
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Issued, not taken.
    ahead: Option<Gathering>,
    /// Of each weight; `None` for one that is in no slot.
    slots: Vec<Option<Weak<Slot>>>,
    /// Gathered again, of the weights in no slot.
    again: Vec<Option<DispatchTensor>>,
}

impl Source {
    pub(super) fn new(unit: Arc<Unit>, members: Vec<usize>, shards: Vec<DispatchTensor>, call: Call) -> Arc<Self> {
        Arc::new(Self { unit, members, shards, call, state: Mutex::default() })
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
        self.state.lock().slots = slots.iter().map(|slot| slot.as_ref().map(Arc::downgrade)).collect();
    }

    /// Issues the all-gather for backward: of `parts`, the shards over a few ranks, or else of the
    /// shards over all.
    pub(super) fn gather_ahead(&self, parts: Option<Vec<DispatchTensor>>) {
        let call = self.call(Phase::Backward).ahead();
        let ahead = match parts {
            Some(parts) => self.unit.all_gather_parts(call, &self.members, parts),
            None => self.unit.all_gather_again(call, &self.members, self.shards.clone()),
        };
        self.state.lock().ahead = Some(ahead);
    }

    /// Takes the result of that all-gather, once. Every slot is full then.
    pub(super) fn take(&self) {
        let mut state = self.state.lock();
        let Some(ahead) = state.ahead.take() else { return };
        let wholes = self.wholes(ahead);
        let slots = std::mem::take(&mut state.slots).into_iter().chain(std::iter::repeat_with(|| None));
        let again = wholes.into_iter().zip(slots).map(|(whole, slot)| match slot {
            None => Some(whole),
            Some(slot) => {
                slot.upgrade().inspect(|slot| slot.fill(whole));
                None
            }
        });
        state.again = again.collect();
    }

    /// The weight at `position`, gathered again, of those in no slot.
    pub(super) fn again(&self, position: usize) -> Option<DispatchTensor> {
        self.state.lock().again.get(position).cloned().flatten()
    }

    /// [`again`](Self::again), given away.
    pub(super) fn take_again(&self, position: usize) -> Option<DispatchTensor> {
        self.state.lock().again.get_mut(position).and_then(Option::take)
    }

    /// Drops what was gathered again and nobody holds.
    pub(super) fn forget(&self) {
        self.state.lock().again.clear();
    }
}

impl Refill for Source {
    fn refill(&self) {
        self.take();
    }
}
