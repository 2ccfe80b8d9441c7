//! [`UnshardedCopies`]: the unsharded copies of a unit's parameters, by the shards that they were gathered from.

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::placing::{Refill, Storage, persistent_copy};
use super::source::ShardGatherer;
use super::unshard_state::{GatherOrigin, StoredWeight, UnshardState};
use crate::comm::CommError;
use crate::param::collectives::PendingAllGather;
use crate::param::shards::{LocalShards, LocalShardsId};

/// Weights of a pass, some of them in evictable storage.
pub(crate) type Weights = Vec<StoredWeight<dyn Storage, DispatchTensor>>;

/// One unsharded copy of some parameters of a unit.
pub(crate) struct UnshardedCopy {
    /// The shards that it is gathered from. An optimizer step replaces the shards, which makes the copy stale.
    shards: LocalShardsId,
    pub(super) state: UnshardState<PendingAllGather, dyn Storage, DispatchTensor>,
    /// Gathers the parameters a second time, for backward: the first of the passes that use the copy. A copy that the
    /// unit holds between passes has none, because a pass holds the unit.
    gatherer: Mutex<Option<Arc<ShardGatherer>>>,
}

impl UnshardedCopy {
    fn new(shards: LocalShardsId, state: UnshardState<PendingAllGather, dyn Storage, DispatchTensor>) -> Arc<Self> {
        Arc::new(Self { shards, state, gatherer: Mutex::default() })
    }

    /// Counts a pass that begins.
    fn begin_pass(&self, gatherer: &Arc<ShardGatherer>) {
        self.state.begin_pass();
        self.gatherer.lock().get_or_insert_with(|| gatherer.clone());
    }

    /// Waits for the all-gather for backward, if one was posted. Later calls return at once.
    pub(crate) fn fill(&self) {
        let Some(gatherer) = self.gatherer.lock().clone() else { return };
        self.state.refill(|gathering, is_started| gatherer.wait_again(gathering, is_started), Storage::fill);
    }

    /// Returns the weight at `position` for backward: see [`UnshardState::again`].
    pub(crate) fn again(&self, position: usize, shared: bool) -> Option<DispatchTensor> {
        let gatherer = self.gatherer.lock().clone()?;
        let wait = |gathering, is_started| gatherer.wait_again(gathering, is_started);
        self.state.again(position, shared, wait, Storage::fill)
    }

    /// Checks that backward may read the weights.
    ///
    /// # Panics
    /// Unwinds with the gatherer's error if the program turned the unit's all-gather in backward off.
    pub(crate) fn check_gathered(&self) {
        if self.state.is_released() {
            let gatherer = self.gatherer.lock().clone();
            gatherer.inspect(|gatherer| gatherer.refuse());
        }
    }

    /// Frees weights that are kept for backward, and posts the all-gather that restores them.
    fn reshard(&self) {
        let gatherer = self.gatherer.lock().clone();
        if let Some(gatherer) = gatherer {
            self.state.reshard(|| gatherer.post_again(), Storage::release);
        }
    }
}

/// Without the gatherer, which refers to the unit.
impl fmt::Debug for UnshardedCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shards, state, .. } = self;
        f.debug_struct("UnshardedCopy").field("shards", shards).field("state", state).finish_non_exhaustive()
    }
}

impl Refill for UnshardedCopy {
    fn refill(&self) {
        self.check_gathered();
        self.fill();
    }
}

/// The unsharded copies of a unit's parameters: those that passes use, and one or more that the next forward will use.
#[derive(Debug, Default)]
pub(crate) struct UnshardedCopies(Mutex<SmallVec<[Arc<UnshardedCopy>; 1]>>);

impl UnshardedCopies {
    /// Returns the copy for a pass that begins, and counts the pass. It is the copy that was gathered or kept for these
    /// shards, if there is one. Otherwise it is a new one.
    ///
    /// A copy that other passes use is returned only to a pass that `joins` them. Any other pass gets a new copy, with
    /// the weights to store in it, in persistent memory.
    pub(crate) fn begin_pass(
        &self,
        shards: &LocalShards,
        joins: bool,
        gatherer: &Arc<ShardGatherer>,
    ) -> (Arc<UnshardedCopy>, Option<Vec<DispatchTensor>>) {
        let shards = LocalShardsId::of(shards);
        let mut copies = self.0.lock();
        remove(&mut copies, |copy| copy.state.is_idle() && copy.is_retained() && copy.shards != shards);
        let found = copies.iter().find(|copy| copy.is_for_next() && copy.shards == shards).cloned();
        let joined = found.clone().filter(|copy| joins || !copy.state.is_open());
        let copy = joined.unwrap_or_else(|| {
            copies.push(UnshardedCopy::new(shards, UnshardState::new()));
            copies[copies.len() - 1].clone()
        });
        copy.begin_pass(gatherer);
        let others = found.filter(|found| !Arc::ptr_eq(found, &copy));
        let values = |weights: &[StoredWeight<_, DispatchTensor>]| {
            weights.iter().map(|weight| persistent_copy(weight.value().clone())).collect()
        };
        let weights = others.and_then(|others| others.state.weights(values));
        (copy, weights)
    }

    /// Creates the copy of a pass that finds no other, and that no other finds.
    pub(crate) fn private(shards: &LocalShards, gatherer: &Arc<ShardGatherer>) -> Arc<UnshardedCopy> {
        let copy = UnshardedCopy::new(LocalShardsId::of(shards), UnshardState::new());
        copy.begin_pass(gatherer);
        copy
    }

    /// Returns true if the next forward over these shards finds parameters that passes retained.
    pub(crate) fn has_retained(&self, shards: &LocalShards) -> bool {
        let shards = LocalShardsId::of(shards);
        self.0.lock().iter().any(|copy| copy.is_retained() && copy.shards == shards)
    }

    /// Returns true if the next forward over these shards finds an all-gather or parameters. Without `posted`, an
    /// all-gather that was only posted does not count.
    pub(crate) fn has(&self, shards: &LocalShards, posted: bool) -> bool {
        let shards = LocalShardsId::of(shards);
        let counts = |copy: &UnshardedCopy| copy.is_for_next() && (posted || !copy.is_posted());
        self.0.lock().iter().any(|copy| counts(copy) && copy.shards == shards)
    }

    /// Changes the origin of an all-gather that was posted for these shards. Returns true if it is
    /// in flight, and `None` if none was posted.
    pub(crate) fn promote(&self, shards: &LocalShards, origin: GatherOrigin) -> Option<bool> {
        let (shards, copies) = (LocalShardsId::of(shards), self.0.lock());
        let posted = copies.iter().find(|copy| copy.is_posted() && copy.shards == shards)?;
        posted.state.gathering(|gathering, before| {
            *before = origin;
            gathering.is_under_way()
        })
    }

    /// Stores an all-gather for the next forward over these shards. It replaces those of other forwards, and what passes
    /// retained.
    pub(crate) fn gather(&self, shards: &LocalShards, gathering: PendingAllGather, origin: GatherOrigin) {
        let mut copies = self.0.lock();
        remove(&mut copies, |copy| copy.state.is_idle());
        copies.push(UnshardedCopy::new(LocalShardsId::of(shards), UnshardState::starting(gathering, origin)));
    }

    /// Drops what the running forward has prefetched and not used.
    pub(crate) fn forget_prefetched(&self) {
        let is_prefetched = |copy: &UnshardedCopy| {
            copy.state.is_idle() && matches!(copy.origin(), Some(GatherOrigin::Prefetch | GatherOrigin::Posted))
        };
        remove(&mut self.0.lock(), is_prefetched);
    }

    /// Returns true if the next forward would not wait for other ranks.
    pub(crate) fn is_ready(&self) -> bool {
        let is_ready = |copy: &Arc<UnshardedCopy>| {
            copy.state.is_open()
                || copy.state.gathering(|gathering, origin| *origin != GatherOrigin::Posted && gathering.is_complete())
                    == Some(true)
        };
        self.0.lock().iter().any(is_ready)
    }

    /// Waits for the all-gathers that `unshard` or a prefetch started. One that fails is dropped.
    pub(crate) fn wait(&self) -> Result<(), CommError> {
        let copies = self.0.lock().clone();
        let is_waited_for = |copy: &&Arc<UnshardedCopy>| !copy.is_posted();
        let waited =
            |copy: &Arc<UnshardedCopy>| copy.state.gathering(|gathering, _| gathering.complete()).unwrap_or(Ok(()));
        let result = copies.iter().filter(is_waited_for).try_for_each(waited);
        if result.is_err() {
            remove(&mut self.0.lock(), |copy| copy.state.is_idle());
        }
        result
    }

    /// Drops what no pass uses, and frees what passes keep for backward.
    pub(crate) fn reshard(&self) {
        let mut copies = self.0.lock();
        remove(&mut copies, |copy| copy.state.is_idle());
        let used = copies.clone();
        drop(copies);
        used.iter().for_each(|copy| copy.reshard());
    }

    /// Ends a pass that uses `copy`. `in_forward` is true if forward has not left the pass.
    pub(crate) fn end_pass(&self, copy: &Arc<UnshardedCopy>, in_forward: bool) {
        copy.state.end_pass(in_forward);
        self.settle(copy);
    }

    /// Called when a pass has left or ended. Keeps the copy for the next forward over its shards, in place of any other
    /// that no pass uses, or drops the unit's reference to a copy that no pass uses any more.
    pub(crate) fn settle(&self, copy: &Arc<UnshardedCopy>) {
        let mut copies = self.0.lock();
        let is_idle = copy.state.is_idle();
        if !copy.is_for_next() {
            copies.retain(|other| !is_idle || !Arc::ptr_eq(other, copy));
            return;
        }
        let is_same = |other: &UnshardedCopy| other.shards == copy.shards;
        remove(&mut copies, |other| other.state.is_idle() && !std::ptr::eq(other, &**copy) && is_same(other));
        if is_idle {
            copy.gatherer.lock().take();
        }
    }
}

/// A copy's storage refers to the copy, which refers to its storage.
impl Drop for UnshardedCopies {
    fn drop(&mut self) {
        self.0.get_mut().iter().for_each(|copy| copy.state.clear());
    }
}

impl UnshardedCopy {
    fn origin(&self) -> Option<GatherOrigin> {
        self.state.gathering(|_, origin| *origin)
    }

    fn is_posted(&self) -> bool {
        self.origin() == Some(GatherOrigin::Posted)
    }

    /// Returns true if the next forward may use it.
    fn is_for_next(&self) -> bool {
        self.origin().is_some() || self.state.is_open()
    }

    /// Returns true if passes have retained it, or keep it, for the next forward.
    fn is_retained(&self) -> bool {
        self.origin() == Some(GatherOrigin::Retained) || self.state.is_open()
    }
}

/// Removes copies, and breaks the cycles of those that no pass uses.
fn remove(copies: &mut SmallVec<[Arc<UnshardedCopy>; 1]>, is_removed: impl Fn(&UnshardedCopy) -> bool) {
    copies.retain(|copy| {
        let is_removed = is_removed(copy);
        if is_removed {
            copy.state.clear();
        }
        !is_removed
    });
}
