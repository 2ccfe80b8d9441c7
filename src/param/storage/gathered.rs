//! [`UnshardState`]: state machine for the weights of one forward through a unit and of its backward.
//!
//! Independent of burn, like [`slot`](super::slot), so that a model checker can test it.
//!
//! ```text
//!            unshard           leave             again              end
//!   Sharded ─────────> Forward ──────> UnderWay ───────> Backward ──────> Done
//!      ^───── end ────────┘  │             ^  └── end ──> Kept ── again ───┘
//!                            └─> Unsharded ────┘ reshard
//! ```
//!
//! | state | weight in evictable storage | other weight |
//! |---|---|---|
//! | `Sharded` | absent | absent |
//! | `Forward` | in the memory that forward gathered | present |
//! | `Unsharded` | in the memory that forward gathered, kept for backward | present |
//! | `UnderWay` | evicted: reading a view restores the storage of all weights | absent |
//! | `Backward` | restored, until the last view is dropped | present until it is returned once |
//! | `Kept` | like `UnderWay`, for views that the program keeps | absent |
//! | `Done` | present as long as its views | absent |
//! | `Released` | evicted, and never restored: reading a view is an error | absent |
//!
//! A unit that forward left without gathering it is `UnderWay` too, because other ranks gather. If no backward
//! follows, its state is `Done` at once. If a backward follows that is not supposed to read the weights, it is
//! `Released`.

use std::mem;
use std::sync::{Arc, Weak};

use super::sync::Mutex;

/// Weights `T`, some of which are views of evictable storage `S`, and an all-gather `G` that restores them.
///
/// The state holds views, and each view holds the state to restore its storage. The creator breaks this cycle by
/// calling [`end`](Self::end).
#[derive(Debug)]
pub struct UnshardState<G, S: ?Sized, T>(Mutex<PassState<G, S, T>>);

#[derive(Debug)]
enum PassState<G, S: ?Sized, T> {
    /// This rank has only its shards.
    Sharded,
    /// Weights with which forward computes.
    Forward(Vec<StoredWeight<S, T>>),
    /// Forward is over, and its weights are kept.
    Unsharded(Vec<StoredWeight<S, T>>),
    /// Forward is over. Holds the issued all-gather for backward, and the view of each weight in evictable storage.
    UnderWay(G, Vec<Option<InSlot<S, T>>>),
    /// Weights gathered for backward.
    Backward(Vec<BackwardWeight<T>>),
    /// The pass ended before this all-gather was needed. Views that the program keeps can still be restored from
    /// it.
    Kept(G, Vec<Option<Weak<S>>>),
    /// Nothing will be gathered any more.
    Done,
    /// Forward is over, its weights are freed, and backward does not gather them.
    Released,
}

/// Policy for the weights after forward.
pub enum After<G> {
    /// They are freed, and not restored, because no backward follows.
    Free,
    /// They are freed, and not restored, although a backward follows.
    Release,
    /// They are kept.
    Keep,
    /// They are freed, and this all-gather restores them for backward.
    Again(G),
}

/// A weight in forward.
#[derive(Debug)]
pub enum StoredWeight<S: ?Sized, T> {
    /// In separate memory, or the stored shard of a parameter that every rank holds in full.
    Own(T),
    #[cfg_attr(not(any(feature = "flex", feature = "cube")), allow(dead_code, reason = "no backend evicts memory"))]
    InSlot(InSlot<S, T>),
}

/// A view, and the evictable storage that it reads.
#[derive(Debug)]
pub struct InSlot<S: ?Sized, T> {
    pub view: T,
    pub slot: Arc<S>,
}

/// A weight in backward.
#[derive(Debug)]
enum BackwardWeight<T> {
    View(T),
    /// Not in evictable storage: returned once, so that its last reader frees it.
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

/// The clone shares the memory.
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

    /// Stores the weights that `gather` returns, unless they are present already. If `gather` fails, the state is
    /// unchanged.
    pub fn unshard<E>(&self, gather: impl FnOnce() -> Result<Vec<StoredWeight<S, T>>, E>) -> Result<(), E> {
        let mut state = self.0.lock();
        if let PassState::Sharded = *state {
            *state = PassState::Forward(gather()?);
        }
        Ok(())
    }

    /// Returns the weight at `position` if the state is `Forward`.
    pub fn forward(&self, position: usize) -> Option<T> {
        match &*self.0.lock() {
            PassState::Forward(weights) => Some(weights[position].value().clone()),
            _ => None,
        }
    }

    /// Returns true if the state is `Forward` and the weight at `position` is in evictable storage.
    pub fn is_in_slot(&self, position: usize) -> bool {
        matches!(&*self.0.lock(), PassState::Forward(weights) if matches!(weights[position], StoredWeight::InSlot(_)))
    }

    /// Ends forward. `after` decides what happens to its weights, and `release` evicts a storage. The lock is held
    /// throughout, so a reader that finds a storage evicted also finds the all-gather that restores it.
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
            After::Release => {
                free(weights, release);
                PassState::Released
            }
            After::Again(issued) => PassState::UnderWay(issued, free(weights, release)),
        };
    }

    /// Returns true if the weights were freed after forward, and backward does not gather them.
    pub fn is_released(&self) -> bool {
        matches!(&*self.0.lock(), PassState::Released)
    }

    /// Frees weights that were kept after forward. The all-gather that `issue` returns restores them for backward.
    pub fn reshard(&self, issue: impl FnOnce() -> G, release: impl Fn(&S)) {
        let mut state = self.0.lock();
        if let PassState::Unsharded(_) = *state
            && let PassState::Unsharded(weights) = mem::replace(&mut *state, PassState::Done)
        {
            *state = PassState::UnderWay(issue(), free(weights, release));
        }
    }

    /// Returns the weights that were kept after forward.
    pub fn kept(&self) -> Option<Vec<StoredWeight<S, T>>> {
        match &*self.0.lock() {
            PassState::Unsharded(weights) => Some(weights.clone()),
            _ => None,
        }
    }

    /// Returns the weights with which backward computed, if all are present.
    pub fn left(&self) -> Option<Vec<T>> {
        match &*self.0.lock() {
            PassState::Unsharded(weights) => Some(weights.iter().map(|weight| weight.value().clone()).collect()),
            PassState::Backward(again) => again.iter().map(BackwardWeight::value).collect(),
            _ => None,
        }
    }

    /// Applies `f` to the issued all-gather, if it has not been waited for. Returns the result of `f`.
    pub fn issued<R>(&self, f: impl FnOnce(&mut G) -> R) -> Option<R> {
        match &mut *self.0.lock() {
            PassState::UnderWay(issued, _) => Some(f(issued)),
            _ => None,
        }
    }

    /// Waits for the issued all-gather once, and restores every storage. The first caller waits, later callers find
    /// the result.
    pub fn refill(&self, wait: impl FnOnce(G) -> Vec<T>, fill: impl Fn(&S, T)) {
        self.0.lock().refill(wait, fill);
    }

    /// Returns the weight at `position` in backward, and restores it first. A weight outside evictable storage is
    /// moved out unless it is `shared`. Returns `None` once it was moved out.
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
            // This is a backward inside the unit's own forward.
            PassState::Forward(weights) | PassState::Unsharded(weights) => Some(weights[position].value().clone()),
            PassState::Backward(again) => match &mut again[position] {
                BackwardWeight::View(view) => Some(view.clone()),
                BackwardWeight::Unsharded(full) if shared => full.clone(),
                BackwardWeight::Unsharded(full) => full.take(),
            },
            PassState::Sharded
            | PassState::UnderWay(..)
            | PassState::Kept(..)
            | PassState::Done
            | PassState::Released => None,
        }
    }

    /// Returns true if the weights of forward or backward are present.
    pub fn is_here(&self) -> bool {
        matches!(&*self.0.lock(), PassState::Forward(_) | PassState::Unsharded(_) | PassState::Backward(_))
    }

    /// Returns true if a weight that the pass holds is in memory.
    #[cfg(feature = "testing")]
    pub fn is_there(&self, is_full: impl Fn(&S) -> bool) -> bool {
        match &*self.0.lock() {
            PassState::Forward(_) | PassState::Unsharded(_) => true,
            PassState::UnderWay(_, in_slots) => in_slots.iter().flatten().any(|in_slot| is_full(&in_slot.slot)),
            PassState::Backward(again) => again.iter().any(|again| !matches!(again, BackwardWeight::Unsharded(None))),
            PassState::Sharded | PassState::Kept(..) | PassState::Done | PassState::Released => false,
        }
    }

    /// Drops everything that the pass holds. A view that the program keeps can still have its storage restored.
    pub fn end(&self) {
        let mut state = self.0.lock();
        let left = |in_slot: Option<InSlot<S, T>>| in_slot.map(|in_slot| Arc::downgrade(&in_slot.slot));
        *state = match mem::replace(&mut *state, PassState::Done) {
            PassState::Sharded | PassState::Forward(_) => PassState::Sharded,
            PassState::UnderWay(issued, in_slots) => PassState::Kept(issued, in_slots.into_iter().map(left).collect()),
            PassState::Kept(issued, slots) => PassState::Kept(issued, slots),
            PassState::Unsharded(_) | PassState::Backward(_) | PassState::Done => PassState::Done,
            PassState::Released => PassState::Released,
        };
    }
}

/// Evicts the storage of these weights, and drops the weights that are not in evictable storage.
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
    /// Restores all storage. The lock is held while this waits for the other ranks, so a concurrent caller finds
    /// the storage restored.
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
