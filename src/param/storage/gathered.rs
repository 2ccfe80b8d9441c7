//! [`UnshardState`]: the weights of one forward through a unit, and of the backward that belongs to it.
//!
//! Apart from burn, as [`slot`](super::slot) is.
//!
//! ```text
//!            unshard           leave             again              end
//!   Sharded ─────────> Forward ──────> UnderWay ───────> Backward ──────> Done
//!      ^───── end ────────┘  │             ^  └── end ──> Kept ── again ───┘
//!                            └─> Unsharded ────┘ reshard
//! ```
//!
//! | state | a weight in a slot | another |
//! |---|---|---|
//! | `Sharded` | not there | not there |
//! | `Forward` | in forward's memory | there |
//! | `Unsharded` | in forward's memory, for backward | there |
//! | `UnderWay` | the slot is empty: who reads a view has all slots filled | not there |
//! | `Backward` | filled again, until the last view goes | until it is given out |
//! | `Kept` | as `UnderWay`, for views that the program keeps | not there |
//! | `Done` | as long as its views | not there |
//!
//! A unit left before it was gathered is `UnderWay` too, since others gather; one that no backward follows
//! is `Done` at once.

use std::mem;
use std::sync::{Arc, Weak};

use super::sync::Mutex;

/// Weights `T`, some of them views of slots `S`, and an all-gather `G` of them.
///
/// Views hold it, to be filled, and it holds views: until [`end`](Self::end), which whoever made it calls.
#[derive(Debug)]
pub struct UnshardState<G, S: ?Sized, T>(Mutex<PassState<G, S, T>>);

#[derive(Debug)]
enum PassState<G, S: ?Sized, T> {
    /// This rank has its shards alone.
    Sharded,
    /// Forward computes with these.
    Forward(Vec<StoredWeight<S, T>>),
    /// Forward is over, and its weights stay.
    Unsharded(Vec<StoredWeight<S, T>>),
    /// Forward is over. Issued, and not waited for, is what backward needs; of a weight in a slot the view
    /// stays.
    UnderWay(G, Vec<Option<InSlot<S, T>>>),
    /// Gathered again.
    Backward(Vec<BackwardWeight<T>>),
    /// The pass has ended without them.
    Kept(G, Vec<Option<Weak<S>>>),
    /// Nothing is gathered any more.
    Done,
}

/// What becomes of the weights once forward is over.
pub enum After<G> {
    /// They are freed for good.
    Free,
    /// They stay.
    Keep,
    /// They are freed, and this brings them back.
    Again(G),
}

/// A weight in forward.
#[derive(Debug)]
pub enum StoredWeight<S: ?Sized, T> {
    /// In memory of its own, or the shard that every rank holds whole.
    Own(T),
    #[cfg_attr(not(any(feature = "flex", feature = "cube")), allow(dead_code, reason = "no backend has slots"))]
    InSlot(InSlot<S, T>),
}

/// A view, and the slot that it sees.
#[derive(Debug)]
pub struct InSlot<S: ?Sized, T> {
    pub view: T,
    pub slot: Arc<S>,
}

/// A weight in backward.
#[derive(Debug)]
enum BackwardWeight<T> {
    View(T),
    /// In no slot: given out once, so that its last reader frees it.
    Unsharded(Option<T>),
}

impl<S: ?Sized, T: Clone> StoredWeight<S, T> {
    pub fn value(&self) -> &T {
        match self {
            Self::Own(full) => full,
            Self::InSlot(InSlot { view, .. }) => view,
        }
    }

    fn in_slot(self) -> Option<InSlot<S, T>> {
        match self {
            Self::Own(_) => None,
            Self::InSlot(in_slot) => Some(in_slot),
        }
    }
}

/// Of the same memory.
impl<S: ?Sized, T: Clone> Clone for StoredWeight<S, T> {
    fn clone(&self) -> Self {
        match self {
            Self::Own(full) => Self::Own(full.clone()),
            Self::InSlot(InSlot { view, slot }) => Self::InSlot(InSlot { view: view.clone(), slot: slot.clone() }),
        }
    }
}

impl<G, S: ?Sized, T: Clone> UnshardState<G, S, T> {
    pub fn new() -> Self {
        Self(Mutex::new(PassState::Sharded))
    }

    /// Puts there what `gather` makes, unless forward has its weights. If that fails, nothing has happened.
    pub fn unshard<E>(&self, gather: impl FnOnce() -> Result<Vec<StoredWeight<S, T>>, E>) -> Result<(), E> {
        let mut state = self.0.lock();
        if let PassState::Sharded = *state {
            *state = PassState::Forward(gather()?);
        }
        Ok(())
    }

    /// The weight at `position`, in forward.
    pub fn forward(&self, position: usize) -> Option<T> {
        match &*self.0.lock() {
            PassState::Forward(weights) => Some(weights[position].value().clone()),
            _ => None,
        }
    }

    /// Whether the weight at `position` is in a slot, in forward.
    pub fn is_in_slot(&self, position: usize) -> bool {
        matches!(&*self.0.lock(), PassState::Forward(weights) if matches!(weights[position], StoredWeight::InSlot(_)))
    }

    /// Forward is over: `after` says what becomes of its weights. Whoever finds a released slot empty finds what fills
    /// it.
    pub fn leave(&self, after: impl FnOnce(&[StoredWeight<S, T>]) -> After<G>, release: impl Fn(&S)) {
        let mut state = self.0.lock();
        let after = match &*state {
            PassState::Forward(weights) => after(weights),
            _ => after(&[]),
        };
        let weights = match mem::replace(&mut *state, PassState::Done) {
            PassState::Forward(weights) => weights,
            _ => Vec::new(),
        };
        *state = match after {
            After::Keep => PassState::Unsharded(weights),
            After::Free => {
                free(weights, release);
                PassState::Done
            }
            After::Again(issued) => PassState::UnderWay(issued, free(weights, release)),
        };
    }

    /// Frees weights that have stayed after forward: what `issue` makes is for backward.
    pub fn reshard(&self, issue: impl FnOnce() -> G, release: impl Fn(&S)) {
        let mut state = self.0.lock();
        if let PassState::Unsharded(_) = *state
            && let PassState::Unsharded(weights) = mem::replace(&mut *state, PassState::Done)
        {
            *state = PassState::UnderWay(issue(), free(weights, release));
        }
    }

    /// The weights that have stayed after forward.
    pub fn kept(&self) -> Option<Vec<StoredWeight<S, T>>> {
        match &*self.0.lock() {
            PassState::Unsharded(weights) => Some(weights.clone()),
            _ => None,
        }
    }

    /// The weights that backward has computed with, if all are there.
    pub fn left(&self) -> Option<Vec<T>> {
        match &*self.0.lock() {
            PassState::Unsharded(weights) => Some(weights.iter().map(|weight| weight.value().clone()).collect()),
            PassState::Backward(again) => again.iter().map(BackwardWeight::value).collect(),
            _ => None,
        }
    }

    /// What `f` makes of what was issued and is not waited for.
    pub fn issued<R>(&self, f: impl FnOnce(&mut G) -> R) -> Option<R> {
        match &mut *self.0.lock() {
            PassState::UnderWay(issued, _) => Some(f(issued)),
            _ => None,
        }
    }

    /// Waits for what was issued, once, and fills every slot, whoever comes first.
    pub fn refill(&self, wait: impl FnOnce(G) -> Vec<T>, fill: impl Fn(&S, T)) {
        self.0.lock().refill(wait, fill);
    }

    /// The weight at `position`, in backward; refills first. Of one in no slot the last handle, unless it is
    /// `shared`; `None` once that was given out.
    pub fn again(
        &self,
        position: usize,
        shared: bool,
        wait: impl FnOnce(G) -> Vec<T>,
        fill: impl Fn(&S, T),
    ) -> Option<T> {
        let mut state = self.0.lock();
        state.refill(wait, fill);
        match &mut *state {
            // A backward inside the unit's own forward.
            PassState::Forward(weights) | PassState::Unsharded(weights) => Some(weights[position].value().clone()),
            PassState::Backward(again) => match &mut again[position] {
                BackwardWeight::View(view) => Some(view.clone()),
                BackwardWeight::Unsharded(full) if shared => full.clone(),
                BackwardWeight::Unsharded(full) => full.take(),
            },
            PassState::Sharded | PassState::UnderWay(..) | PassState::Kept(..) | PassState::Done => None,
        }
    }

    /// Whether forward's or backward's weights are there.
    pub fn is_here(&self) -> bool {
        matches!(&*self.0.lock(), PassState::Forward(_) | PassState::Unsharded(_) | PassState::Backward(_))
    }

    /// Whether a weight that the pass holds is there.
    #[cfg(feature = "testing")]
    pub fn is_there(&self, is_full: impl Fn(&S) -> bool) -> bool {
        match &*self.0.lock() {
            PassState::Forward(_) | PassState::Unsharded(_) => true,
            PassState::UnderWay(_, in_slots) => in_slots.iter().flatten().any(|in_slot| is_full(&in_slot.slot)),
            PassState::Backward(again) => again.iter().any(|again| !matches!(again, BackwardWeight::Unsharded(None))),
            PassState::Sharded | PassState::Kept(..) | PassState::Done => false,
        }
    }

    /// The pass lets go of all that it held. What a view reads it can still have filled.
    pub fn end(&self) {
        let mut state = self.0.lock();
        let left = |in_slot: Option<InSlot<S, T>>| in_slot.map(|in_slot| Arc::downgrade(&in_slot.slot));
        *state = match mem::replace(&mut *state, PassState::Done) {
            PassState::Sharded | PassState::Forward(_) => PassState::Sharded,
            PassState::UnderWay(issued, in_slots) => PassState::Kept(issued, in_slots.into_iter().map(left).collect()),
            PassState::Kept(issued, slots) => PassState::Kept(issued, slots),
            PassState::Unsharded(_) | PassState::Backward(_) | PassState::Done => PassState::Done,
        };
    }
}

/// Releases the slots of these weights, and lets go of those in none.
fn free<S: ?Sized, T: Clone>(weights: Vec<StoredWeight<S, T>>, release: impl Fn(&S)) -> Vec<Option<InSlot<S, T>>> {
    let in_slots: Vec<_> = weights.into_iter().map(StoredWeight::in_slot).collect();
    in_slots.iter().flatten().for_each(|in_slot| release(&in_slot.slot));
    in_slots
}

impl<T: Clone> BackwardWeight<T> {
    fn value(&self) -> Option<T> {
        match self {
            Self::View(view) => Some(view.clone()),
            Self::Unsharded(full) => full.clone(),
        }
    }
}

impl<G, S: ?Sized, T> PassState<G, S, T> {
    /// The lock is held while the ranks are waited for: who comes then finds the slots full.
    fn refill(&mut self, wait: impl FnOnce(G) -> Vec<T>, fill: impl Fn(&S, T)) {
        *self = match mem::replace(self, Self::Done) {
            Self::UnderWay(issued, in_slots) => {
                let in_slots = in_slots.into_iter().chain(std::iter::repeat_with(|| None));
                let again = wait(issued).into_iter().zip(in_slots).map(|(full, in_slot)| match in_slot {
                    None => BackwardWeight::Unsharded(Some(full)),
                    Some(InSlot { view, slot }) => {
                        fill(&slot, full);
                        BackwardWeight::View(view)
                    }
                });
                Self::Backward(again.collect())
            }
            Self::Kept(issued, slots) => {
                for (full, slot) in wait(issued).into_iter().zip(slots) {
                    if let Some(slot) = slot.and_then(|slot| slot.upgrade()) {
                        fill(&slot, full);
                    }
                }
                Self::Done
            }
            state => state,
        };
    }
}
