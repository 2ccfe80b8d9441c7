//! [`SharedResultCache`]: results that ranks of a process have in common, for those that have yet to come.
//!
//! Memory in common is there for as long as a rank has a handle, or the [`CachedResults`] of its collective. Ranks that
//! are ahead must not fill the memory with what others come to much later. So of what is gathered a group's latest bag
//! alone is full, and where a rank finds that a result is gone it makes it again: a copy, as it would be for one rank.
//! What is reduced would take as many times longer as there are ranks; it stays until every rank has taken it, as the
//! terms do.

use std::cell::Cell;
use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use burn::backend::flex::FlexTensor;

use super::super::match_table::{GroupKey, OpHandle};
use super::super::rendezvous::SpinPolicy;
use super::super::sync::Mutex;
use crate::memory::HostMemoryPool;

/// Value of [`SharedResultCache::patience`]: many turns of a busy core.
const PATIENCE: Duration = Duration::from_millis(250);

/// What ranks of a process have in common.
pub(in crate::comm::local) struct SharedResultCache {
    /// How ranks pass the time before they sleep.
    pub(super) lingers: SpinPolicy,
    /// How long a rank waits for a piece of another's while none is made.
    pub(super) patience: Duration,
    /// Where the memory of results waits for the next ones, whichever rank begins them.
    home: Arc<HostMemoryPool>,
    /// Of each group the latest collective of which a bag is full, but for reductions.
    latest: Mutex<HashMap<GroupKey, (u64, Weak<CachedResults>)>>,
}

impl SharedResultCache {
    /// Of ranks that linger so; with the memory of the one that these had `before`.
    pub fn new(lingers: SpinPolicy, before: Option<&Self>) -> Self {
        let home = before.map(|before| before.home.clone()).unwrap_or_default();
        Self { lingers, patience: PATIENCE, home, latest: Mutex::new(HashMap::new()) }
    }

    /// The same, of ranks that wait for as long as it takes: for tests, which no hiccup of the machine's is to fail.
    #[cfg(test)]
    pub fn patient(self) -> Self {
        Self { patience: Duration::from_secs(3600), ..self }
    }

    /// Has `bag` be the latest of its group, which may be filled, unless there is a later one. What was in an earlier one is
    /// there no longer: before there is new memory.
    fn make_room(&self, OpHandle { group, seq, .. }: OpHandle, bag: &Arc<CachedResults>) -> bool {
        let mut latest = self.latest.lock();
        if latest.get(&group).is_some_and(|(later, _)| *later > seq) {
            return false;
        }
        let before = latest.insert(group, (seq, Arc::downgrade(bag)));
        drop(latest);
        if let Some(before) = before.and_then(|(_, before)| before.upgrade())
            && !Arc::ptr_eq(&before, bag)
        {
            let results = mem::take(&mut *before.0.lock());
            drop(results);
        }
        true
    }
}

/// Handles to the results of one collective.
pub(super) struct CachedResults(Mutex<Vec<FlexTensor>>);

/// How long results are kept for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm::local) enum ResultRetention {
    /// Until the group makes the next.
    Latest,
    /// Until all ranks have them.
    All,
}

/// Where results in common belong, and how long their rank has waited for others meanwhile.
#[derive(Clone, Copy)]
pub(in crate::comm::local) struct Owner<'a> {
    pub(super) shelf: &'a SharedResultCache,
    pub(super) ticket: OpHandle,
    pub(super) bag: &'a Arc<CachedResults>,
    pub(super) keep: ResultRetention,
    pub(super) waited: &'a Cell<Duration>,
}

impl Owner<'_> {
    /// Where their memory is from.
    pub fn home(&self) -> &Arc<HostMemoryPool> {
        &self.shelf.home
    }

    /// Results will be made.
    pub fn begin(&self) {
        if self.keep == ResultRetention::Latest {
            self.shelf.make_room(self.ticket, self.bag);
        }
    }

    /// Keeps `results` for others.
    pub fn keep(&self, results: &[FlexTensor]) {
        if self.keep == ResultRetention::All || self.shelf.make_room(self.ticket, self.bag) {
            self.bag.0.lock().extend_from_slice(results);
        }
    }

    /// What `wait` returns, whose time is no time of moving.
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
