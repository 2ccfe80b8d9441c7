//! [`UnshardedCopies`]: the unsharded copies of a unit's parameters, by the shards that they were gathered from.
//!
//! The tables below decide whether a forward gathers, and what
//! [`reshard`](UnshardedCopies::reshard) gathers for backward. All ranks decide identically,
//! because the tables change only by what the program does:
//!
//! | the program | changes |
//! |---|---|
//! | enters the unit over some shards | takes what is *next* for them; forgets what is of [replaced](LocalShardsId::replaces) shards |
//! | leaves a forward that keeps its weights for backward | counts it as *kept* |
//! | leaves a forward without a backward, or ends a backward, and the weights stay | makes them *next* |
//! | ends a backward | takes one from the kept passes over its shards; of no entry are passes *recent* any more; without `set_reshard_after_backward(false)`, no pass joins those that share weights |
//! | calls `unshard`, or prefetches | makes the all-gather the only *next* one |
//! | leaves the outermost unit | forgets what was prefetched |
//! | calls `reshard` | empties both tables, except for entries of a running forward, and posts one all-gather for each entry of the kept passes |
//! | calls `reset_iter_state` | the same, and posts nothing |
//! | sets or removes the unit's codec | lets no pass find copies that were gathered before |
//!
//! A pass that burn drops changes neither. If its rank posts an all-gather for it, it drops the
//! result; another rank may need the rank's shards.

use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use burn::backend::DispatchTensor;
use itertools::Itertools;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::evictable::{Refill, Storage};
use super::placing::persistent_copy;
use super::source::ShardGatherer;
use super::unshard_state::{GatherOrigin, StoredWeight, UnshardState};
use crate::comm::CommError;
use crate::param::pending_all_gather::PendingAllGather;
use crate::param::shards::{LocalShards, LocalShardsId};

/// Weights of a pass, some of them in evictable storage.
pub(crate) type Weights = Vec<StoredWeight<dyn Storage, DispatchTensor>>;

/// One unsharded copy of some parameters of a unit.
pub(crate) struct UnshardedCopy {
    /// The shards that it is gathered from. An optimizer step replaces the shards, which makes the
    /// copy stale.
    shards: Arc<LocalShardsId>,
    pub(crate) state: UnshardState<PendingAllGather, dyn Storage, DispatchTensor>,
    /// Gathers the parameters a second time, for backward: the first of the passes that use the
    /// copy. A copy that the unit holds between passes has none, so that its shards can be freed.
    gatherer: Mutex<Option<Arc<ShardGatherer>>>,
}

impl UnshardedCopy {
    fn new(
        shards: Arc<LocalShardsId>,
        state: UnshardState<PendingAllGather, dyn Storage, DispatchTensor>,
    ) -> Arc<Self> {
        Arc::new(Self {
            shards,
            state,
            gatherer: Mutex::default(),
        })
    }

    /// Counts a pass that begins.
    fn begin_pass(&self, gatherer: &Arc<ShardGatherer>) {
        let mut own = self.gatherer.lock();
        self.state.begin_pass();
        own.get_or_insert_with(|| gatherer.clone());
    }

    /// Ends a pass that uses the copy. `in_forward` is true if forward has not left the pass.
    pub(crate) fn end_pass(&self, in_forward: bool) {
        self.state.end_pass(in_forward);
        self.release_gatherer();
    }

    /// Releases the gatherer, with its shards, if no pass uses the copy. A view that outlives its
    /// passes still needs it.
    pub(crate) fn release_gatherer(&self) {
        let mut own = self.gatherer.lock();
        let is_held_by_unit =
            self.state.is_idle() && (self.origin().is_some() || self.state.is_open());
        let released = if is_held_by_unit { own.take() } else { None };
        // Dropped outside the lock: it may be the last reference to the shards.
        drop(own);
        drop(released);
    }

    /// Waits for the all-gather for backward, if one was posted. Later calls return at once.
    pub(crate) fn fill(&self) {
        let Some(gatherer) = self.gatherer.lock().clone() else {
            return;
        };
        self.state.refill(
            |gathering, is_started| gatherer.wait_for_backward(gathering, is_started),
            Storage::fill,
        );
    }

    /// Returns the weight at `position` for backward: see [`UnshardState::backward_weight`].
    pub(crate) fn backward_weight(&self, position: usize, shared: bool) -> Option<DispatchTensor> {
        let gatherer = self.gatherer.lock().clone()?;
        self.state.backward_weight(
            position,
            shared,
            |gathering, is_started| gatherer.wait_for_backward(gathering, is_started),
            Storage::fill,
        )
    }

    /// Checks that backward may read the weights.
    ///
    /// # Panics
    /// Unwinds with the gatherer's error if the program turned the unit's all-gather in backward
    /// off.
    pub(crate) fn check_gathered(&self) {
        if self.state.is_released() {
            let gatherer = self.gatherer.lock().clone();
            gatherer.inspect(|gatherer| gatherer.refuse());
        }
    }

    /// Lets no other pass use the copy. Drops what it holds if no pass uses it.
    fn close(&self) {
        self.state.close();
        self.state.clear();
    }

    fn origin(&self) -> Option<GatherOrigin> {
        self.state.gathering(|_, origin| *origin)
    }

    fn is_posted(&self) -> bool {
        self.origin() == Some(GatherOrigin::Posted)
    }
}

/// Without the gatherer, which refers to the shards.
impl fmt::Debug for UnshardedCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shards, state, .. } = self;
        f.debug_struct("UnshardedCopy")
            .field("shards", shards)
            .field("state", state)
            .finish_non_exhaustive()
    }
}

impl Refill for UnshardedCopy {
    fn refill(&self) {
        self.check_gathered();
        self.fill();
    }
}

/// The unsharded copies of a unit's parameters: those that the next forward will use, and those
/// that passes keep for their backward.
#[derive(Debug, Default)]
pub(crate) struct UnshardedCopies {
    tables: Mutex<CopyTables>,
    /// Number of times that the program has changed the codec of the unit's shards.
    encoding: AtomicU64,
}

#[derive(Debug, Default)]
struct CopyTables {
    /// The copies that were gathered or retained for the next forward over the same shards. No pass
    /// uses them.
    next: SmallVec<[Arc<UnshardedCopy>; 1]>,
    /// The passes that keep their weights for backward. One entry for the same shards; the entry of
    /// the last forward is the last one.
    kept: SmallVec<[KeptPasses; 1]>,
    /// Number of entries that `kept` has had.
    entries: u64,
}

/// The passes over the same shards that keep their weights for backward.
#[derive(Debug)]
struct KeptPasses {
    id: KeptId,
    shards: Arc<LocalShardsId>,
    /// The copy that these passes share, and that the next forward over these shards joins.
    open: Option<Arc<UnshardedCopy>>,
    /// Number of these passes whose backward has not ended.
    waiting: u64,
    /// Number of these passes that forward has left since the unit's last backward.
    recent: u64,
    /// Gathers their weights a second time: that of the first of them; `None` if no pass waits.
    gatherer: Option<Arc<ShardGatherer>>,
    /// This rank's copies, which exist as long as its passes do.
    copies: SmallVec<[Weak<UnshardedCopy>; 1]>,
}

/// Identifies an entry of the kept passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeptId(u64);

impl CopyTables {
    fn open(&self, shards: &LocalShardsId) -> Option<&Arc<UnshardedCopy>> {
        self.kept
            .iter()
            .find(|kept| *kept.shards == *shards)?
            .open
            .as_ref()
    }

    fn next(&self, shards: &LocalShardsId) -> Option<&Arc<UnshardedCopy>> {
        self.next.iter().find(|copy| *copy.shards == *shards)
    }

    /// Forgets what is of shards that these replace: retained weights, and kept passes. The kept
    /// passes of the last forward over replaced shards remain if they have been left since the last
    /// backward, so that two clones of a module may take turns.
    fn replace(&mut self, shards: &LocalShardsId) {
        remove(&mut self.next, |copy| {
            copy.origin() == Some(GatherOrigin::Retained) && shards.replaces(&copy.shards)
        });
        let last = self
            .kept
            .iter()
            .rposition(|kept| shards.replaces(&kept.shards));
        let mut at = 0;
        self.kept.retain(|kept| {
            let stays = !shards.replaces(&kept.shards) || Some(at) == last && kept.recent > 0;
            at += 1;
            if !stays {
                kept.close();
            }
            stays
        });
    }
}

impl KeptPasses {
    /// Lets no other pass use the shared copy.
    fn close(&mut self) {
        self.open.take().inspect(|copy| copy.close());
    }
}

impl UnshardedCopies {
    fn id(&self, shards: &LocalShards) -> LocalShardsId {
        LocalShardsId::of(shards, self.encoding.load(Relaxed))
    }

    /// Records that all-gathers send the shards in another encoding. No pass finds copies that were
    /// gathered in an earlier one.
    pub(crate) fn change_encoding(&self) {
        self.encoding.fetch_add(1, Relaxed);
    }

    /// Returns the copy for a pass that begins, and counts the pass. It is the copy that was
    /// gathered or kept for these shards, if there is one. Otherwise it is a new one.
    ///
    /// A copy that other passes use is returned only to a pass that `joins` them. Any other pass
    /// gets a new copy, with the weights to store in it, in persistent memory.
    pub(crate) fn begin_pass(
        &self,
        shards: &LocalShards,
        joins: bool,
        gatherer: &Arc<ShardGatherer>,
    ) -> (Arc<UnshardedCopy>, Option<Vec<DispatchTensor>>) {
        let shards = self.id(shards);
        let mut tables = self.tables.lock();
        tables.replace(&shards);
        let mut found = None;
        let mut weights = None;
        if let Some(at) = tables.next.iter().position(|copy| *copy.shards == shards) {
            debug_assert!(tables.next[at].origin().is_some(), "no pass uses it");
            found = Some(tables.next.remove(at));
        } else if let Some(open) = tables.open(&shards) {
            match joins {
                true => found = Some(open.clone()),
                false => {
                    weights = open.state.weights(|weights| {
                        weights
                            .iter()
                            .map(|weight| persistent_copy(weight.value().clone()))
                            .collect()
                    });
                }
            }
        }
        drop(tables);
        let copy = found.unwrap_or_else(|| UnshardedCopy::new(shards.into(), UnshardState::new()));
        copy.begin_pass(gatherer);
        (copy, weights)
    }

    /// Creates the copy of a pass that finds no other, and that no other finds.
    pub(crate) fn private(
        shards: &LocalShards,
        gatherer: &Arc<ShardGatherer>,
    ) -> Arc<UnshardedCopy> {
        let copy = UnshardedCopy::new(
            LocalShardsId::of(shards, u64::MAX).into(),
            UnshardState::new(),
        );
        copy.begin_pass(gatherer);
        copy
    }

    /// Records that forward has left a pass that keeps the weights in `copy` for its backward, and
    /// that `gatherer` gathers a second time. Returns the entry in which it is counted.
    pub(crate) fn keep(&self, copy: &Arc<UnshardedCopy>, gatherer: &Arc<ShardGatherer>) -> KeptId {
        let mut tables = self.tables.lock();
        let mut kept = match tables
            .kept
            .iter()
            .position(|kept| kept.shards == copy.shards)
        {
            Some(at) => tables.kept.remove(at),
            None => {
                tables.entries += 1;
                KeptPasses {
                    id: KeptId(tables.entries),
                    shards: copy.shards.clone(),
                    open: None,
                    waiting: 0,
                    recent: 0,
                    gatherer: None,
                    copies: SmallVec::new(),
                }
            }
        };
        kept.waiting += 1;
        kept.recent += 1;
        kept.gatherer.get_or_insert_with(|| gatherer.clone());
        kept.copies
            .retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), &**copy));
        kept.copies.push(Arc::downgrade(copy));
        if copy.state.is_open() && kept.open.is_none() {
            kept.open = Some(copy.clone());
            remove(&mut tables.next, |other| other.shards == copy.shards);
        }
        let id = kept.id;
        tables.kept.push(kept);
        id
    }

    /// Records that the backward of a pass has ended, which was counted as `kept`. If the weights
    /// do not `stay`, no other pass joins those that share `copy`.
    pub(crate) fn end_backward(&self, kept: Option<KeptId>, copy: &Arc<UnshardedCopy>, stay: bool) {
        let mut tables = self.tables.lock();
        tables.kept.retain(|entry| {
            entry.recent = 0;
            if Some(entry.id) == kept {
                entry.waiting -= 1;
            }
            if !stay
                && entry
                    .open
                    .as_ref()
                    .is_some_and(|open| Arc::ptr_eq(open, copy))
            {
                entry.close();
            }
            if entry.waiting == 0 {
                entry.gatherer = None;
                entry.copies.clear();
            }
            entry.waiting > 0 || entry.open.is_some()
        });
    }

    /// Makes weights that a pass has retained those of the next forward over the same shards, which
    /// must not [join](Self::next_joins) other passes.
    pub(crate) fn retain(&self, copy: &Arc<UnshardedCopy>) {
        let mut tables = self.tables.lock();
        debug_assert!(
            tables.open(&copy.shards).is_none(),
            "the next forward uses the weights that passes share"
        );
        remove(&mut tables.next, |other| other.shards == copy.shards);
        tables.next.push(copy.clone());
        drop(tables);
        copy.release_gatherer();
    }

    /// Returns true if the next forward over these shards joins other passes.
    pub(crate) fn next_joins(&self, copy: &UnshardedCopy) -> bool {
        self.tables.lock().open(&copy.shards).is_some()
    }

    /// Returns true if the next forward over these shards finds parameters that passes kept or
    /// retained.
    pub(crate) fn has_retained(&self, shards: &LocalShards) -> bool {
        let shards = self.id(shards);
        let tables = self.tables.lock();
        tables.open(&shards).is_some()
            || tables
                .next(&shards)
                .is_some_and(|copy| copy.origin() == Some(GatherOrigin::Retained))
    }

    /// Returns true if the next forward over these shards finds an all-gather or parameters.
    /// Without `posted`, an all-gather that was only posted does not count.
    pub(crate) fn has(&self, shards: &LocalShards, posted: bool) -> bool {
        let shards = self.id(shards);
        let tables = self.tables.lock();
        tables.open(&shards).is_some()
            || tables
                .next(&shards)
                .is_some_and(|copy| posted || !copy.is_posted())
    }

    /// Changes the origin of an all-gather that was posted for these shards. Returns true if it is
    /// in flight, and `None` if none was posted.
    pub(crate) fn promote(&self, shards: &LocalShards, origin: GatherOrigin) -> Option<bool> {
        let shards = self.id(shards);
        let tables = self.tables.lock();
        let posted = tables.next(&shards).filter(|copy| copy.is_posted())?;
        posted.state.gathering(|gathering, before| {
            *before = origin;
            gathering.is_under_way()
        })
    }

    /// Stores an all-gather for the next forward over these shards. It replaces those of other
    /// forwards, and what passes retained.
    pub(crate) fn gather(
        &self,
        shards: &LocalShards,
        gathering: PendingAllGather,
        origin: GatherOrigin,
    ) {
        let shards = self.id(shards);
        let mut tables = self.tables.lock();
        tables.replace(&shards);
        remove(&mut tables.next, |_| true);
        tables.next.push(UnshardedCopy::new(
            shards.into(),
            UnshardState::starting(gathering, origin),
        ));
    }

    /// Drops what the running forward has prefetched and not used.
    pub(crate) fn forget_prefetched(&self) {
        remove(&mut self.tables.lock().next, |copy| {
            matches!(
                copy.origin(),
                Some(GatherOrigin::Prefetch | GatherOrigin::Posted)
            )
        });
    }

    /// Returns true if the next forward would not wait for other ranks. Local: no collective
    /// depends on it.
    pub(crate) fn is_ready(&self) -> bool {
        let is_ready = |copy: &Arc<UnshardedCopy>| {
            copy.state.gathering(|gathering, origin| {
                *origin != GatherOrigin::Posted && gathering.is_complete()
            }) == Some(true)
        };
        let tables = self.tables.lock();
        tables.kept.iter().any(|kept| kept.open.is_some()) || tables.next.iter().any(is_ready)
    }

    /// Waits for the all-gathers that `unshard` or a prefetch started. One that fails is dropped.
    pub(crate) fn wait(&self) -> Result<(), CommError> {
        let mut taken = TakenCopies(mem::take(&mut self.tables.lock().next));
        taken
            .0
            .iter()
            .filter(|copy| !copy.is_posted())
            .try_for_each(|copy| {
                copy.state
                    .gathering(|gathering, _| gathering.complete())
                    .unwrap_or(Ok(()))
            })?;
        self.tables.lock().next = mem::take(&mut taken.0);
        Ok(())
    }

    /// Drops what the next forward would use, and frees what passes keep for backward. Posts one
    /// all-gather for all kept passes over the same shards, which restores the weights of those
    /// that this rank has.
    ///
    /// Weights that a running forward computes with stay, and so do those of all passes that share
    /// them.
    ///
    /// # Collective
    /// Every rank that shards the unit, if passes are kept.
    pub(crate) fn reshard(&self) {
        for kept in self.take_kept() {
            let Some(gatherer) = kept.gatherer else {
                continue;
            };
            let gathering = PendingAllGather::shared(gatherer.post_after_reshard());
            // A device's allocation takes the memory of a result, so one result restores one copy.
            // The others stay.
            let most = if gatherer.is_on_host() { usize::MAX } else { 1 };
            for copy in kept.copies.iter().filter_map(Weak::upgrade).take(most) {
                copy.state.reshard(|| gathering.share(), Storage::release);
            }
        }
    }

    /// Drops what the next forward would use, and what abandoned passes keep for a backward. Local:
    /// no communication.
    pub(crate) fn abandon(&self) {
        for kept in self.take_kept() {
            let copies = kept.copies.iter().filter_map(Weak::upgrade);
            copies.for_each(|copy| copy.state.abandon(Storage::release));
        }
    }

    /// Empties both tables, except for passes that share weights with a running forward. Returns
    /// the kept passes.
    fn take_kept(&self) -> SmallVec<[KeptPasses; 1]> {
        let mut tables = self.tables.lock();
        remove(&mut tables.next, |_| true);
        let (running, mut kept): (SmallVec<_>, SmallVec<[_; 1]>) =
            mem::take(&mut tables.kept).into_iter().partition(|kept| {
                kept.open
                    .as_ref()
                    .is_some_and(|copy| copy.state.is_in_forward())
            });
        tables.kept = running;
        kept.iter_mut().for_each(KeptPasses::close);
        kept
    }

    /// Describes what decides the next all-gather over these shards, to compare ranks.
    pub(crate) fn describe(&self, shards: &LocalShards) -> String {
        let shards = self.id(shards);
        let tables = self.tables.lock();
        let next = match tables.next(&shards).and_then(|copy| copy.origin()) {
            Some(GatherOrigin::Retained) => "retained weights",
            // Who has posted it depends on the backend.
            Some(GatherOrigin::Program | GatherOrigin::Prefetch | GatherOrigin::Posted) => {
                "an all-gather"
            }
            None if tables.open(&shards).is_some() => "kept weights",
            None => "nothing",
        };
        let kept = tables
            .kept
            .iter()
            .map(|kept| format!("{}/{}", kept.waiting, kept.recent))
            .join(" ");
        format!(
            "finds {next}, {} in all, passes kept: [{kept}]",
            tables.next.len()
        )
    }
}

/// A copy's storage refers to the copy, which refers to its storage.
impl Drop for UnshardedCopies {
    fn drop(&mut self) {
        let CopyTables { next, kept, .. } = self.tables.get_mut();
        next.iter().for_each(|copy| copy.close());
        kept.iter_mut().for_each(KeptPasses::close);
    }
}

/// Copies that no pass uses, while they are waited for. They are removed if one fails, also by
/// unwinding with the error of its codec.
struct TakenCopies(SmallVec<[Arc<UnshardedCopy>; 1]>);

impl Drop for TakenCopies {
    fn drop(&mut self) {
        remove(&mut self.0, |_| true);
    }
}

/// Removes copies that no pass uses, and breaks their cycles.
fn remove(
    copies: &mut SmallVec<[Arc<UnshardedCopy>; 1]>,
    is_removed: impl Fn(&UnshardedCopy) -> bool,
) {
    copies.retain(|copy| {
        let is_removed = is_removed(copy);
        if is_removed {
            copy.close();
        }
        !is_removed
    });
}
