//! [`UnshardState`]: state of one unsharded copy of a unit's parameters. This is the only file that changes it.
//!
//! A copy is shared by the passes (a forward and its backward) that use it, and by the unit while a
//! later pass may find it. It is of one set of shards, and counts its passes. Passes over the same
//! shards may share a copy; a pass over other shards, such as those of a stepped clone, has another
//! one.
//!
//! **This is the state of this rank's memory.** The number of passes is local: burn's graph decides
//! when a pass is dropped. So no collective is posted or left out because of it. What the next
//! forward finds, and what the program reshards, follows from what the program did:
//! [`copies`](super::copies).
//!
//! ```text
//!             starting              unshard                 reshard, leave(Gather)
//!   Sharded      └────> Gathering ─────────> Unsharded ───────────────────────────> Resharded ── refill ──> Regathered
//!      └────────────────── unshard ─────────────^ │ │                                    │                      │
//!                             ^                   │ └─ leave(Release) ─> Released        └ last pass ends       │
//!                             └── retain ─────────┤                                            v                │
//!                                                 └─ last pass ends, leave(Free) ──> Done <─ Detached           │
//!                                                                                      ^────── last pass ends ──┘
//! ```
//!
//! | state | this rank has | passes |
//! |---|---|---|
//! | `Sharded` | its shards | any number |
//! | `Gathering` | an all-gather that was posted or started before the pass that will use it, or parameters that the last pass retained | none, until one begins |
//! | `Unsharded` | the parameters with which forward computes, or which are kept for backward | any number |
//! | `Resharded` | an all-gather for backward: reading a view restores the storage of all parameters | at least one |
//! | `Regathered` | the parameters that were gathered for backward; those outside evictable storage until they are taken | at least one |
//! | `Detached` | an all-gather that no pass will need; views that the program keeps can be restored from it | none |
//! | `Released` | its shards; reading a view is an error | any number |
//! | `Done` | its shards; views of regathered storage stay readable | any number |
//!
//! | operation | from | to |
//! |---|---|---|
//! | [`starting`](UnshardState::starting) | | `Gathering` |
//! | [`begin_pass`](UnshardState::begin_pass) | any | counts one more pass, in forward |
//! | [`unshard`](UnshardState::unshard) | `Sharded`, `Gathering` | `Unsharded`; `Sharded` if the all-gather fails |
//! | [`leave`](UnshardState::leave) `Keep` | any | `Unsharded` |
//! | `leave` `Gather` | any | `Resharded` |
//! | `leave` `Free`, `Release` | any | `Done`, `Released`; no change if the copy is shared |
//! | `leave` `Retain` | any | `Gathering`, without the pass |
//! | [`retain`](UnshardState::retain), by the pass of a private copy | `Unsharded`, `Regathered` | `Gathering`, without the pass |
//! | [`reshard`](UnshardState::reshard) | `Unsharded`, if no pass is in forward and some wait for backward | `Resharded` |
//! | [`abandon`](UnshardState::abandon) | the same | `Released` |
//! | [`refill`](UnshardState::refill) | `Resharded`, `Detached` | `Regathered`, `Done` |
//! | [`end_pass`](UnshardState::end_pass), the last one | `Unsharded` | `Unsharded` if it is open to other passes, `Sharded` if forward unwinds, else `Done` |
//! | the same | `Resharded`, `Regathered` | `Detached`, `Done` |
//! | [`clear`](UnshardState::clear) | `Gathering`, `Unsharded`, without passes | `Sharded` |
//!
//! Every other combination leaves the state as it is. Of the states that `leave` replaces, only
//! `Unsharded` has weights to keep or to free: in the others the unit was not gathered, or a
//! backward inside its forward has ended the pass.
//!
//! Independent of burn, like [`slot`](super::slot), so that a model checker can test it.

use std::mem;
use std::sync::{Arc, Weak};

use super::sync::Mutex;

/// State of weights `T`, some of which are views of evictable storage `S`, and an all-gather `G`
/// that yields them.
///
/// The state holds views, and each view holds the state to restore its storage. The owner breaks
/// this cycle: passes by [`end_pass`](Self::end_pass), the unit by [`clear`](Self::clear).
#[derive(Debug)]
pub struct UnshardState<G, S: ?Sized, T>(Mutex<CountedCopy<G, S, T>>);

#[derive(Debug)]
struct CountedCopy<G, S: ?Sized, T> {
    state: CopyState<G, S, T>,
    /// Number of passes that use the copy.
    passes: usize,
    /// Number of these passes that are in forward.
    in_forward: usize,
    sharing: Sharing,
}

/// Policy for passes that begin while a copy is unsharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// The copy is of one pass.
    Private,
    /// Passes over the same shards may join, also after the last one has ended.
    Open,
    /// Passes share the copy, and no other may join.
    Closed,
}

#[derive(Debug)]
enum CopyState<G, S: ?Sized, T> {
    Sharded,
    Gathering(G, GatherOrigin),
    Unsharded(Vec<StoredWeight<S, T>>),
    Resharded {
        gather: G,
        is_started: bool,
        views: Vec<Option<InSlot<S, T>>>,
    },
    Regathered(Vec<BackwardWeight<T>>),
    Detached {
        gather: G,
        is_started: bool,
        slots: Vec<Option<Weak<S>>>,
    },
    Released,
    Done,
}

/// Origin of an all-gather that a pass finds when it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatherOrigin {
    /// The program called `unshard`.
    Program,
    /// An earlier unit of the running forward prefetched the parameters.
    Prefetch,
    /// An earlier unit of the running forward posted the all-gather, whose data transfer does not
    /// start before this unit is entered.
    Posted,
    /// A pass retained the parameters for the next forward.
    Retained,
}

/// Policy for the weights after forward.
pub enum After<G> {
    /// They are freed, and not restored, because no backward follows.
    Free,
    /// They are freed, and not restored, although a backward follows.
    Release,
    /// They are kept for backward. If `share`, passes over the same shards may join.
    Keep { share: bool },
    /// They are freed, and this all-gather restores them for backward.
    Gather(G),
    /// They are retained for the next forward, as the result of this all-gather. The pass no longer
    /// uses the copy.
    Retain(G),
}

/// A weight in forward.
#[derive(Debug)]
pub enum StoredWeight<S: ?Sized, T> {
    /// In separate memory, or the stored shard of a parameter that every rank holds in full.
    Own(T),
    #[cfg_attr(
        not(any(feature = "flex", feature = "cube")),
        allow(dead_code, reason = "no backend evicts memory")
    )]
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

impl<T: Clone> BackwardWeight<T> {
    fn value(&self) -> Option<T> {
        match self {
            Self::View(view) => Some(view.clone()),
            Self::Unsharded(full) => full.clone(),
        }
    }
}

impl<G, S: ?Sized, T: Clone> UnshardState<G, S, T> {
    /// Creates the state of a copy that nothing was gathered for.
    pub fn new() -> Self {
        Self::of(CopyState::Sharded)
    }

    /// Creates the state of a copy whose all-gather was posted or started before a pass begins.
    pub fn starting(gather: G, origin: GatherOrigin) -> Self {
        Self::of(CopyState::Gathering(gather, origin))
    }

    fn of(state: CopyState<G, S, T>) -> Self {
        Self(Mutex::new(CountedCopy {
            state,
            passes: 0,
            in_forward: 0,
            sharing: Sharing::Private,
        }))
    }

    /// Counts a pass that begins, in forward.
    pub fn begin_pass(&self) {
        let mut copy = self.0.lock();
        copy.passes += 1;
        copy.in_forward += 1;
    }

    /// Returns true if no pass uses the copy.
    pub fn is_idle(&self) -> bool {
        self.0.lock().passes == 0
    }

    /// Returns true if passes over the same shards may join those that use the copy.
    pub fn is_open(&self) -> bool {
        let copy = self.0.lock();
        copy.sharing == Sharing::Open && matches!(copy.state, CopyState::Unsharded(_))
    }

    /// Returns true if several passes have been allowed to use the copy.
    pub fn was_shared(&self) -> bool {
        self.0.lock().sharing != Sharing::Private
    }

    /// Lets no other pass join those that use the copy.
    pub fn close(&self) {
        let mut copy = self.0.lock();
        if copy.sharing == Sharing::Open {
            copy.sharing = Sharing::Closed;
        }
    }

    /// Applies `f` to the all-gather that was posted or started before a pass began, and to its
    /// origin, which `f` may change. Returns the result of `f`.
    pub fn gathering<R>(&self, f: impl FnOnce(&mut G, &mut GatherOrigin) -> R) -> Option<R> {
        match &mut self.0.lock().state {
            CopyState::Gathering(gather, origin) => Some(f(gather, origin)),
            _ => None,
        }
    }

    /// Stores the weights that `gather` returns, unless there are any. `gather` gets the all-gather
    /// that was posted or started before, if there is one, and its origin.
    pub fn unshard<E>(
        &self,
        gather: impl FnOnce(Option<(G, GatherOrigin)>) -> Result<Vec<StoredWeight<S, T>>, E>,
    ) -> Result<(), E> {
        let mut copy = self.0.lock();
        let started = match &copy.state {
            CopyState::Sharded => None,
            CopyState::Gathering(..) => match mem::replace(&mut copy.state, CopyState::Sharded) {
                CopyState::Gathering(started, origin) => Some((started, origin)),
                _ => unreachable!("it was matched"),
            },
            _ => return Ok(()),
        };
        copy.state = CopyState::Unsharded(gather(started)?);
        Ok(())
    }

    /// Returns the unsharded weights, if the state is `Unsharded`.
    pub fn weights<R>(&self, f: impl FnOnce(&[StoredWeight<S, T>]) -> R) -> Option<R> {
        match &self.0.lock().state {
            CopyState::Unsharded(weights) => Some(f(weights)),
            _ => None,
        }
    }

    /// Ends the forward of a pass. `release` evicts a storage. The lock is held throughout, so a
    /// reader that finds a storage evicted also finds the all-gather that restores it.
    pub fn leave(&self, after: After<G>, release: impl Fn(&S)) {
        let mut copy = self.0.lock();
        copy.in_forward -= 1;
        if matches!(after, After::Free | After::Release)
            && (copy.passes > 1 || copy.sharing == Sharing::Open)
        {
            return;
        }
        let weights = match mem::replace(&mut copy.state, CopyState::Done) {
            CopyState::Unsharded(weights) => weights,
            _ => Vec::new(),
        };
        copy.state = match after {
            After::Keep { share } => {
                if share && !weights.is_empty() && copy.sharing == Sharing::Private {
                    copy.sharing = Sharing::Open;
                }
                CopyState::Unsharded(weights)
            }
            After::Free => {
                free(weights, release);
                CopyState::Done
            }
            After::Release => {
                free(weights, release);
                CopyState::Released
            }
            After::Gather(gather) => CopyState::Resharded {
                gather,
                is_started: false,
                views: free(weights, release),
            },
            After::Retain(gather) => {
                free(weights, release);
                copy.passes -= 1;
                CopyState::Gathering(gather, GatherOrigin::Retained)
            }
        };
    }

    /// Returns true if a pass that uses the copy is in forward.
    pub fn is_in_forward(&self) -> bool {
        self.0.lock().in_forward > 0
    }

    /// Frees weights that are kept for backward. The all-gather that `gather` returns restores
    /// them.
    pub fn reshard(&self, gather: impl FnOnce() -> G, release: impl Fn(&S)) {
        let mut copy = self.0.lock();
        if let Some(weights) = copy.take_kept() {
            copy.state = CopyState::Resharded {
                gather: gather(),
                is_started: false,
                views: free(weights, release),
            };
        }
    }

    /// Frees weights that are kept for a backward that the program has abandoned. They are not
    /// restored.
    pub fn abandon(&self, release: impl Fn(&S)) {
        let mut copy = self.0.lock();
        if let Some(weights) = copy.take_kept() {
            free(weights, release);
            copy.state = CopyState::Released;
        }
    }

    /// Retains the weights of a private copy for the next forward, as the result of the all-gather
    /// that `keep` returns. The pass no longer uses the copy. Returns false if not all weights are
    /// present.
    pub fn retain(&self, keep: impl FnOnce(Vec<T>) -> G) -> bool {
        let mut copy = self.0.lock();
        debug_assert_eq!(
            (copy.sharing, copy.passes),
            (Sharing::Private, 1),
            "no other pass uses a private copy"
        );
        let weights: Option<Vec<T>> = match &copy.state {
            CopyState::Unsharded(weights) => Some(
                weights
                    .iter()
                    .map(|weight| weight.value().clone())
                    .collect(),
            ),
            CopyState::Regathered(weights) => weights.iter().map(BackwardWeight::value).collect(),
            _ => None,
        };
        let Some(weights) = weights else { return false };
        copy.passes = 0;
        copy.state = CopyState::Gathering(keep(weights), GatherOrigin::Retained);
        true
    }

    /// Starts the data transfer of the all-gather for backward by `start`, unless it has started.
    /// Returns true if it starts now.
    pub fn start(&self, start: impl FnOnce(&mut G)) -> bool {
        match &mut self.0.lock().state {
            CopyState::Resharded {
                gather, is_started, ..
            } if !*is_started => {
                start(gather);
                *is_started = true;
                true
            }
            _ => false,
        }
    }

    /// Returns true if [`start`](Self::start) has something to start.
    pub fn is_to_start(&self) -> bool {
        matches!(
            &self.0.lock().state,
            CopyState::Resharded {
                is_started: false,
                ..
            }
        )
    }

    /// Returns true if the all-gather for backward has started, is complete, and its result was not
    /// taken.
    pub fn is_started(&self, is_complete: impl FnOnce(&G) -> bool) -> bool {
        match &self.0.lock().state {
            CopyState::Resharded {
                gather,
                is_started: true,
                ..
            } => is_complete(gather),
            _ => false,
        }
    }

    /// Waits for the all-gather for backward once, and restores every storage. The first caller
    /// waits, later callers find the result. The lock is held while this waits for the other ranks.
    /// `wait` also gets true if the data transfer was started before.
    pub fn refill(&self, wait: impl FnOnce(G, bool) -> Vec<T>, fill: impl Fn(&S, T)) {
        self.0.lock().state.refill(wait, fill);
    }

    /// Returns the weight at `position` in backward, and restores it first. A weight outside
    /// evictable storage is moved out unless it is `shared`, or passes share the copy. Returns
    /// `None` once it was moved out.
    pub fn backward_weight(
        &self,
        position: usize,
        shared: bool,
        wait: impl FnOnce(G, bool) -> Vec<T>,
        fill: impl Fn(&S, T),
    ) -> Option<T> {
        let mut copy = self.0.lock();
        let shared = shared || copy.passes > 1;
        copy.state.refill(wait, fill);
        match &mut copy.state {
            // Kept for backward, or a backward inside the unit's own forward.
            CopyState::Unsharded(weights) => {
                weights.get(position).map(|weight| weight.value().clone())
            }
            CopyState::Regathered(weights) => match &mut weights[position] {
                BackwardWeight::Unsharded(full) if !shared => full.take(),
                weight => weight.value(),
            },
            _ => None,
        }
    }

    /// Returns true if the weights were freed after forward, and backward does not gather them.
    pub fn is_released(&self) -> bool {
        matches!(&self.0.lock().state, CopyState::Released)
    }

    /// Returns true if the weights of forward or backward are present.
    pub fn is_unsharded(&self) -> bool {
        matches!(
            &self.0.lock().state,
            CopyState::Unsharded(_) | CopyState::Regathered(_)
        )
    }

    /// Returns true if a weight that the copy holds is in memory.
    #[cfg(feature = "testing")]
    pub fn is_in_memory(&self, is_full: impl Fn(&S) -> bool) -> bool {
        match &self.0.lock().state {
            CopyState::Unsharded(_) => true,
            CopyState::Resharded { views, .. } => {
                views.iter().flatten().any(|in_slot| is_full(&in_slot.slot))
            }
            CopyState::Regathered(weights) => weights
                .iter()
                .any(|weight| !matches!(weight, BackwardWeight::Unsharded(None))),
            _ => false,
        }
    }

    /// Ends a pass. The last one drops everything that the copy holds, unless it is open to other
    /// passes. A view that the program keeps can still have its storage restored. `in_forward` is
    /// true if forward has not left the pass.
    pub fn end_pass(&self, in_forward: bool) {
        let mut copy = self.0.lock();
        copy.passes -= 1;
        copy.in_forward -= usize::from(in_forward);
        if copy.passes > 0 {
            return;
        }
        copy.state = match mem::replace(&mut copy.state, CopyState::Done) {
            CopyState::Unsharded(weights) if copy.sharing == Sharing::Open => {
                CopyState::Unsharded(weights)
            }
            CopyState::Unsharded(_) if in_forward => CopyState::Sharded,
            CopyState::Unsharded(_) | CopyState::Regathered(_) => CopyState::Done,
            CopyState::Resharded {
                gather,
                is_started,
                views,
            } => CopyState::Detached {
                gather,
                is_started,
                slots: views
                    .into_iter()
                    .map(|view| view.map(|in_slot| Arc::downgrade(&in_slot.slot)))
                    .collect(),
            },
            other => other,
        };
    }

    /// Drops the weights or the all-gather of a copy that no pass uses.
    pub fn clear(&self) {
        let mut copy = self.0.lock();
        if copy.passes == 0
            && matches!(
                copy.state,
                CopyState::Gathering(..) | CopyState::Unsharded(_)
            )
        {
            copy.state = CopyState::Sharded;
        }
    }
}

impl<G, S: ?Sized, T> CountedCopy<G, S, T> {
    /// Takes the weights that are kept for backward, unless a pass is in forward, and lets no other
    /// pass join.
    fn take_kept(&mut self) -> Option<Vec<StoredWeight<S, T>>> {
        let is_kept = self.in_forward == 0
            && self.passes > 0
            && matches!(self.state, CopyState::Unsharded(_));
        if !is_kept {
            return None;
        }
        if self.sharing == Sharing::Open {
            self.sharing = Sharing::Closed;
        }
        match mem::replace(&mut self.state, CopyState::Done) {
            CopyState::Unsharded(weights) => Some(weights),
            _ => unreachable!("it was matched"),
        }
    }
}

/// Evicts the storage of these weights, and drops the weights that are not in evictable storage.
fn free<S: ?Sized, T: Clone>(
    weights: Vec<StoredWeight<S, T>>,
    release: impl Fn(&S),
) -> Vec<Option<InSlot<S, T>>> {
    let in_slots: Vec<_> = weights.into_iter().map(StoredWeight::in_slot).collect();
    in_slots
        .iter()
        .flatten()
        .for_each(|in_slot| release(&in_slot.slot));
    in_slots
}

impl<G, S: ?Sized, T> CopyState<G, S, T> {
    /// Restores all storage. A concurrent caller finds it restored.
    fn refill(&mut self, wait: impl FnOnce(G, bool) -> Vec<T>, fill: impl Fn(&S, T)) {
        *self = match mem::replace(self, Self::Done) {
            Self::Resharded {
                gather,
                is_started,
                views,
            } => {
                let views = views.into_iter().chain(std::iter::repeat_with(|| None));
                let weights = wait(gather, is_started).into_iter().zip(views).map(
                    |(full, view)| match view {
                        None => BackwardWeight::Unsharded(Some(full)),
                        Some(InSlot { view, slot }) => {
                            fill(&slot, full);
                            BackwardWeight::View(view)
                        }
                    },
                );
                Self::Regathered(weights.collect())
            }
            Self::Detached {
                gather,
                is_started,
                slots,
            } => {
                for (full, slot) in wait(gather, is_started).into_iter().zip(slots) {
                    if let Some(slot) = slot.and_then(|slot| slot.upgrade()) {
                        fill(&slot, full);
                    }
                }
                Self::Done
            }
            other => other,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;

    /// Storage that is full or evicted.
    #[derive(Debug)]
    struct Slot(AtomicBool);

    type TestCopy = UnshardState<&'static str, Slot, u32>;

    /// Two weights, the first in evictable storage.
    fn weights() -> Vec<StoredWeight<Slot, u32>> {
        let in_slot = InSlot {
            view: 1,
            slot: Arc::new(Slot(AtomicBool::new(true))),
        };
        vec![StoredWeight::InSlot(in_slot), StoredWeight::Own(2)]
    }

    fn release(slot: &Slot) {
        assert!(slot.0.swap(false, Relaxed), "evicted once");
    }

    fn fill(slot: &Slot, full: u32) {
        assert!(!slot.0.swap(true, Relaxed) && full == 1, "it was evicted");
    }

    /// Waits for an all-gather of this name, which was started before or not.
    fn wait(
        expected: &'static str,
        was_started: bool,
    ) -> impl FnOnce(&'static str, bool) -> Vec<u32> {
        move |gather, is_started| {
            assert_eq!((gather, is_started), (expected, was_started));
            vec![1, 2]
        }
    }

    fn never(_: &'static str, _: bool) -> Vec<u32> {
        panic!("there is nothing to wait for")
    }

    fn name(copy: &TestCopy) -> &'static str {
        match &copy.0.lock().state {
            CopyState::Sharded => "Sharded",
            CopyState::Gathering(..) => "Gathering",
            CopyState::Unsharded(_) => "Unsharded",
            CopyState::Resharded { .. } => "Resharded",
            CopyState::Regathered(_) => "Regathered",
            CopyState::Detached { .. } => "Detached",
            CopyState::Released => "Released",
            CopyState::Done => "Done",
        }
    }

    /// A copy with one pass, in forward.
    fn in_forward() -> TestCopy {
        let copy = TestCopy::new();
        copy.begin_pass();
        copy.unshard(|_| Ok::<_, ()>(weights())).unwrap();
        copy
    }

    fn after(policy: After<&'static str>) -> TestCopy {
        let copy = in_forward();
        copy.leave(policy, release);
        copy
    }

    fn regathered() -> TestCopy {
        let copy = after(After::Gather("again"));
        copy.refill(wait("again", false), fill);
        copy
    }

    fn detached() -> (TestCopy, Arc<Slot>) {
        let copy = in_forward();
        let slot = copy.weights(|weights| match &weights[0] {
            StoredWeight::InSlot(in_slot) => in_slot.slot.clone(),
            StoredWeight::Own(_) => unreachable!(),
        });
        copy.leave(After::Gather("again"), release);
        copy.end_pass(false);
        (copy, slot.expect("it is unsharded"))
    }

    /// A copy in every state, with its name.
    fn all() -> Vec<(&'static str, TestCopy)> {
        vec![
            ("Sharded", TestCopy::new()),
            (
                "Gathering",
                TestCopy::starting("first", GatherOrigin::Prefetch),
            ),
            ("Unsharded", in_forward()),
            ("Resharded", after(After::Gather("again"))),
            ("Regathered", regathered()),
            ("Detached", detached().0),
            ("Released", after(After::Release)),
            ("Done", after(After::Free)),
        ]
    }

    type Policy = fn() -> After<&'static str>;

    /// Policies of [`TestCopy::leave`], and the states that they lead to.
    const POLICIES: [(Policy, &str); 6] = [
        (|| After::Keep { share: false }, "Unsharded"),
        (|| After::Keep { share: true }, "Unsharded"),
        (|| After::Gather("again"), "Resharded"),
        (|| After::Free, "Done"),
        (|| After::Release, "Released"),
        (|| After::Retain("retained"), "Gathering"),
    ];

    /// Makes `copy` one that so many passes use.
    fn set_passes(copy: &TestCopy, passes: usize, in_forward: usize) {
        let mut copy = copy.0.lock();
        (copy.passes, copy.in_forward) = (passes, in_forward);
    }

    /// Applies `operate` to a copy in every state, and checks which states change, and to what.
    fn check(changes: &[(&str, &str)], operate: impl Fn(&TestCopy)) {
        for (before, copy) in all() {
            assert_eq!(name(&copy), before);
            operate(&copy);
            let expected = changes
                .iter()
                .find(|(from, _)| *from == before)
                .map_or(before, |(_, to)| to);
            assert_eq!(name(&copy), expected, "from {before}");
        }
    }

    #[test]
    fn operations_change_the_states_of_the_table_and_no_other() {
        check(
            &[("Sharded", "Unsharded"), ("Gathering", "Unsharded")],
            |copy| {
                let posted = copy.gathering(|gather, origin| (*gather, *origin));
                copy.unshard(|started| {
                    assert_eq!(started, posted);
                    Ok::<_, ()>(weights())
                })
                .unwrap();
            },
        );
        check(&[("Gathering", "Sharded")], |copy| {
            _ = copy.unshard(|_| Err(()))
        });
        check(&[], |copy| copy.begin_pass());
        check(&[], |copy| _ = copy.start(|_| ()));
        check(&[], |copy| {
            copy.reshard(|| panic!("no pass waits for backward"), release)
        });
        check(&[("Unsharded", "Resharded")], |copy| {
            set_passes(copy, 1, 0);
            copy.reshard(|| "by hand", release);
        });
        check(&[], |copy| copy.abandon(release));
        check(&[("Unsharded", "Released")], |copy| {
            set_passes(copy, 1, 0);
            copy.abandon(release);
        });
        check(
            &[("Resharded", "Regathered"), ("Detached", "Done")],
            |copy| copy.refill(|_, _| vec![1, 2], fill),
        );
        check(
            &[("Unsharded", "Gathering"), ("Regathered", "Gathering")],
            |copy| {
                set_passes(copy, 1, 0);
                let is_retained = copy.retain(|weights| {
                    assert_eq!(weights, [1, 2]);
                    "retained"
                });
                assert_eq!(
                    is_retained,
                    copy.gathering(|gather, origin| (*gather, *origin))
                        == Some(("retained", GatherOrigin::Retained))
                );
            },
        );
        check(&[("Gathering", "Sharded")], TestCopy::clear);
        for (policy, to) in POLICIES {
            let expected: Vec<_> = all().iter().map(|(from, _)| (*from, to)).collect();
            let leave = |copy: &TestCopy, passes| {
                set_passes(copy, passes, 1);
                copy.leave(policy(), release);
            };
            check(&expected, |copy| leave(copy, 1));
            let is_freed = matches!(policy(), After::Free | After::Release);
            check(if is_freed { &[] } else { &expected }, |copy| {
                leave(copy, 2)
            });
        }
        let end_pass = |copy: &TestCopy, passes, in_forward| {
            set_passes(copy, passes, 1);
            copy.end_pass(in_forward);
        };
        let detached = [("Resharded", "Detached"), ("Regathered", "Done")];
        check(
            &[&detached[..], &[("Unsharded", "Sharded")]].concat(),
            |copy| end_pass(copy, 1, true),
        );
        check(
            &[&detached[..], &[("Unsharded", "Done")]].concat(),
            |copy| end_pass(copy, 1, false),
        );
        check(&[], |copy| end_pass(copy, 2, true));
    }

    #[test]
    fn the_end_of_forward_leads_where_the_policy_says() {
        for (policy, expected) in POLICIES {
            let copy = after(policy());
            assert_eq!(name(&copy), expected);
            assert_eq!(copy.is_idle(), expected == "Gathering");
        }
        // A unit that forward left without gathering it: other ranks gather.
        let copy = TestCopy::new();
        copy.begin_pass();
        copy.leave(After::Gather("again"), release);
        assert_eq!(
            copy.backward_weight(1, false, wait("again", false), fill),
            Some(2)
        );
    }

    #[test]
    fn the_last_pass_drops_the_copy() {
        for (copy, in_forward, expected) in [
            (in_forward(), true, "Sharded"),
            (after(After::Keep { share: false }), false, "Done"),
            (after(After::Keep { share: true }), false, "Unsharded"),
            (after(After::Gather("again")), false, "Detached"),
            (regathered(), false, "Done"),
            (after(After::Release), false, "Released"),
            (after(After::Free), false, "Done"),
        ] {
            copy.end_pass(in_forward);
            assert_eq!(name(&copy), expected);
            assert!(copy.is_idle());
        }
    }

    #[test]
    fn passes_that_share_a_copy_keep_it() {
        let copy = after(After::Keep { share: true });
        assert!(copy.is_open());
        copy.begin_pass();
        // Not under a pass in forward.
        copy.reshard(|| panic!("a pass is in forward"), release);
        copy.leave(After::Free, release);
        copy.end_pass(false);
        assert_eq!((name(&copy), copy.is_idle()), ("Unsharded", false));
        copy.reshard(|| "by hand", release);
        assert_eq!(
            (name(&copy), copy.is_open(), copy.was_shared()),
            ("Resharded", false, true)
        );
        copy.begin_pass();
        let read = |shared| copy.backward_weight(1, shared, wait("by hand", false), fill);
        assert_eq!(
            [read(false), read(false)],
            [Some(2); 2],
            "two passes read it"
        );
        copy.end_pass(true);
        assert_eq!(
            [
                copy.backward_weight(1, false, never, fill),
                copy.backward_weight(1, false, never, fill)
            ],
            [Some(2), None],
            "given away"
        );
        copy.end_pass(false);
        assert_eq!(name(&copy), "Done");

        let copy = after(After::Keep { share: true });
        copy.close();
        copy.end_pass(false);
        assert_eq!((name(&copy), copy.is_open()), ("Done", false));

        let copy = after(After::Keep { share: true });
        copy.end_pass(false);
        copy.begin_pass();
        assert_eq!(copy.weights(<[_]>::len), Some(2), "another pass finds it");
        copy.end_pass(true);
        copy.clear();
        assert_eq!(name(&copy), "Sharded");
    }

    #[test]
    fn the_all_gather_for_backward_is_started_and_waited_for_once() {
        let copy = after(After::Gather("again"));
        assert!(copy.is_to_start() && !copy.is_started(|_| true));
        assert!(copy.start(|_| ()) && !copy.start(|_| panic!("it has started")));
        assert!(!copy.is_to_start() && copy.is_started(|_| true) && !copy.is_started(|_| false));
        assert_eq!(
            copy.backward_weight(0, false, wait("again", true), fill),
            Some(1)
        );
        copy.refill(never, fill);
        assert_eq!(
            copy.backward_weight(0, false, never, fill),
            Some(1),
            "a view is given out as often as it is asked for"
        );
        assert_eq!(
            [true, false, false].map(|shared| copy.backward_weight(1, shared, never, fill)),
            [Some(2), Some(2), None]
        );
        assert!(copy.is_unsharded());
    }

    #[test]
    fn a_view_that_outlives_its_passes_is_restored() {
        let (copy, slot) = detached();
        assert!(!slot.0.load(Relaxed));
        copy.refill(wait("again", false), fill);
        assert!(slot.0.load(Relaxed));
        let (copy, slot) = detached();
        drop(slot);
        copy.refill(wait("again", false), |_, _| panic!("no view reads it"));
    }
}
