//! [`SharedResultCache`]: results shared by the ranks of a process, kept for ranks that need them later.
//!
//! A shared result is alive as long as a rank has a handle to it, or the [`CachedResults`] of its collective keep
//! one. A fast rank must not fill memory with results that its peers need much later. Therefore only the latest
//! gather of each group is kept. A rank that finds a result evicted copies it once more, which takes as long as
//! without sharing. The result of a reduction is kept until every rank has taken it, as its operands are, because
//! recomputing it takes time proportional to the number of ranks.

use std::cell::Cell;
use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use burn::backend::flex::FlexTensor;

use crate::comm::control::match_table::{GroupKey, OpHandle};
use crate::comm::control::rendezvous::SpinPolicy;
use crate::comm::control::sync::Mutex;
use crate::memory::HostMemoryPool;

/// Cache of the results that ranks of a process share.
pub(in crate::comm) struct SharedResultCache {
    /// Policy by which ranks spin or yield before they sleep.
    pub(super) spin: SpinPolicy,
    /// Pool of the memory of shared results.
    home: Arc<HostMemoryPool>,
    /// Latest collective of each group whose results are cached; reductions are not included.
    latest: Mutex<HashMap<GroupKey, (u64, Weak<CachedResults>)>>,
}

impl SharedResultCache {
    /// Creates a cache, with the memory pool of the cache `before`, if there is one.
    pub fn new(spin: SpinPolicy, before: Option<&Self>) -> Self {
        let home = before.map(|before| before.home.clone()).unwrap_or_default();
        Self { spin, home, latest: Mutex::new(HashMap::new()) }
    }

    /// Makes `cached` the latest of its group, and evicts the results of an earlier one before new memory is
    /// allocated. Returns false if there is a later one, so that nothing may be cached in `cached`.
    fn make_room(&self, OpHandle { group, seq, .. }: OpHandle, cached: &Arc<CachedResults>) -> bool {
        let mut latest = self.latest.lock();
        if latest.get(&group).is_some_and(|(later, _)| *later > seq) {
            return false;
        }
        let before = latest.insert(group, (seq, Arc::downgrade(cached)));
        drop(latest);
        if let Some(before) = before.and_then(|(_, before)| before.upgrade())
            && !Arc::ptr_eq(&before, cached)
        {
            let results = mem::take(&mut *before.0.lock());
            drop(results);
        }
        true
    }
}

/// Handles to the results of one collective.
pub(super) struct CachedResults(Mutex<Vec<FlexTensor>>);

/// Time for which results are kept for other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum ResultRetention {
    /// Until the next gather of the group.
    Latest,
    /// Until all ranks have taken them.
    All,
}

/// Owner of the shared results of one collective.
#[derive(Clone, Copy)]
pub(super) struct ResultOwner<'a> {
    pub cache: &'a SharedResultCache,
    pub op: OpHandle,
    pub cached: &'a Arc<CachedResults>,
    pub keep: ResultRetention,
}

/// Owner of the shared results of one collective, as one rank uses it.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Owner<'a> {
    pub(super) results: ResultOwner<'a>,
    pub(super) waited: &'a Cell<Duration>,
}

impl ResultOwner<'_> {
    /// Returns the pool of their memory.
    pub fn home(&self) -> &Arc<HostMemoryPool> {
        &self.cache.home
    }

    /// Prepares the cache before results are built: evicts earlier ones of the group.
    pub fn begin(&self) {
        if self.keep == ResultRetention::Latest {
            self.cache.make_room(self.op, self.cached);
        }
    }

    /// Caches `results` for other ranks.
    pub fn keep(&self, results: &[FlexTensor]) {
        if self.keep == ResultRetention::All || self.cache.make_room(self.op, self.cached) {
            self.cached.0.lock().extend_from_slice(results);
        }
    }
}

impl Owner<'_> {
    /// Runs `wait`, and counts its time as time that the rank waited for others.
    pub fn wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let value = wait();
        self.waited.set(self.waited.get() + start.elapsed());
        value
    }
}

impl Default for CachedResults {
    fn default() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl std::fmt::Debug for CachedResults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&*self.0.lock()).finish()
    }
}
