//! [`CooperativeResult`]: a result that is identical on all ranks of a process, built by the ranks that wait for
//! it, and stored once.
//!
//! The work is divided into tasks. Each rank takes tasks until none remain. A rank that arrives
//! later takes a handle.
//!
//! ```text
//! rank 0   waits: | task 0 | task 2 | task 3 |  a handle
//! rank 1              waits: |  task 1    |     a handle
//! rank 2                                           waits: a handle
//! ```
//!
//! A tensor is a handle in any case, and burn writes in place only through a unique handle. If two
//! ranks share a result, the first that writes gets a private copy. Sharing therefore affects only
//! time and memory.
//!
//! A result is alive as long as a rank has a handle to it, or the [`CachedResults`] of its
//! collective keep one for ranks that need it later. A fast rank must not fill memory with results
//! that its peers need much later. Therefore only the latest gather of each group is kept. A rank
//! that finds a result evicted copies it once more, which takes as long as without sharing. The
//! result of a reduction is kept until every rank has taken it, as its operands are, because
//! recomputing it takes time proportional to the number of ranks.
//!
//! 1. All threads of a rank's pool take tasks.
//! 2. A thread that has taken a task does nothing else before the task is complete, so no task
//!    waits for other work of the thread's pool. A rank therefore waits for tasks of others without
//!    a deadline: they are short, and a thread that panics in one ends the wait.

use std::cell::Cell;
use std::collections::HashMap;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType};

use crate::comm::control::match_table::{GroupKey, OpHandle};
use crate::comm::control::rendezvous::{LONGEST, SpinPolicy};
use crate::comm::control::sync::{Condvar, Mutex};
use crate::kernels::flex::{OutputBuffers, OutputPtrs};
use crate::memory::HostMemoryPool;

/// Work that is divided into tasks.
///
/// # Safety
/// The tasks cover all elements of the results, and no two tasks write the same element.
pub(super) unsafe trait PartitionedJob: Sync {
    /// Data that describes the division into tasks.
    type Partition: Send + Sync;

    /// Allocates memory, and divides the work. Returns the memory, the division, and the number of
    /// tasks, which is at least one.
    fn begin(&self, home: &Arc<HostMemoryPool>) -> (OutputBuffers, Self::Partition, usize);

    /// Performs task `index` on the calling thread alone, and writes to the memory at `to`.
    ///
    /// # Safety
    /// `sizes` and `to` are from one [`begin`](Self::begin). No other thread performs this task,
    /// and no thread reads its output.
    unsafe fn make(&self, sizes: &Self::Partition, index: usize, to: &OutputPtrs);

    /// Returns the results.
    ///
    /// # Safety
    /// All tasks are complete.
    unsafe fn finish(&self, targets: OutputBuffers) -> Vec<FlexTensor>;
}

/// Results of a [`PartitionedJob`] whose division is a `C`.
pub(super) struct CooperativeResult<C> {
    state: Mutex<BuildState<C>>,
    changed: Condvar,
}

enum BuildState<C> {
    /// No rank has begun, or a rank has failed.
    Open,
    Making(Arc<Making<C>>),
    /// The results, for as long as another handle keeps them alive.
    Made(Box<[WeakTensor]>),
}

/// Results that are being built.
struct Making<C> {
    partition: C,
    count: usize,
    /// Addresses of the targets, which do not move until the results are complete.
    to: OnceLock<OutputPtrs>,
    targets: Mutex<Option<OutputBuffers>>,
    /// Next task that no thread has taken.
    next: AtomicUsize,
    /// Number of tasks that are not complete.
    left: AtomicUsize,
    made: OnceLock<Vec<FlexTensor>>,
    has_failed: AtomicBool,
}

/// A tensor that this handle does not keep alive.
struct WeakTensor {
    data: Weak<Bytes>,
    layout: Layout,
    dtype: DType,
}

impl WeakTensor {
    fn of(tensor: &FlexTensor) -> Self {
        Self {
            data: Arc::downgrade(&tensor.data_arc()),
            layout: tensor.layout().clone(),
            dtype: tensor.dtype(),
        }
    }

    fn get(&self) -> Option<FlexTensor> {
        Some(FlexTensor::from_arc(
            self.data.upgrade()?,
            self.layout.clone(),
            self.dtype,
        ))
    }
}

impl<C> Making<C> {
    fn is_over(&self) -> bool {
        self.made.get().is_some() || self.has_failed.load(Ordering::Acquire)
    }
}

impl<C> Default for CooperativeResult<C> {
    fn default() -> Self {
        Self {
            state: Mutex::new(BuildState::Open),
            changed: Condvar::default(),
        }
    }
}

impl<C: Send + Sync> CooperativeResult<C> {
    /// Returns the results of `job`: builds them with the other ranks that wait, or takes handles
    /// if they exist.
    ///
    /// # Safety
    /// All jobs with which this is called have the same results.
    pub unsafe fn get(
        &self,
        job: &impl PartitionedJob<Partition = C>,
        owner: Owner,
    ) -> Vec<FlexTensor> {
        loop {
            let making = match self.find(job, &owner) {
                Ok(made) => return made,
                Err(making) => making,
            };
            // `owner.waited` is the calling thread's; the other threads do not wait.
            let cache = owner.cache;
            let cached = owner.cached;
            let op = owner.op;
            let keep = owner.keep;
            let keep_made = |made: &[FlexTensor]| {
                if keep == ResultRetention::All || cache.make_room(op, cached) {
                    cached.0.lock().extend_from_slice(made);
                }
            };
            // SAFETY: all jobs are equal.
            let work = || unsafe { self.work(&making, job, keep_made) };
            match rayon::current_num_threads() {
                // Only threads of a rank's pool may wait for jobs of that pool.
                threads if threads > 1 && rayon::current_thread_index().is_some() => {
                    rayon::in_place_scope(|scope| {
                        (1..threads).for_each(|_| scope.spawn(|_| work()));
                        work();
                    })
                }
                _ => work(),
            }
            // The other threads complete their tasks, or one of them fails.
            let start = Instant::now();
            let until = Instant::now() + LONGEST;
            owner.cache.spin.pass(until, || !making.is_over());
            let mut state = self.state.lock();
            while !making.is_over() {
                (state, _) = self.changed.wait_until(state, until);
            }
            drop(state);
            owner.waited.set(owner.waited.get() + start.elapsed());
            if let Some(made) = making.made.get() {
                return made.clone();
            }
        }
    }

    /// Performs tasks until all are taken. The thread that completes the last one passes the
    /// results to `keep`, and publishes them.
    ///
    /// # Safety
    /// `job` is the job that has begun `making`, or an equal job of another rank.
    unsafe fn work(
        &self,
        making: &Arc<Making<C>>,
        job: &impl PartitionedJob<Partition = C>,
        keep: impl Fn(&[FlexTensor]),
    ) {
        loop {
            let index = making.next.fetch_add(1, Ordering::Relaxed);
            if index >= making.count || making.has_failed.load(Ordering::Relaxed) {
                return;
            }
            let failing = Failing { of: self, making };
            // SAFETY: the task was taken once, and the caller guarantees the rest; no rank has the
            // results before all tasks are complete.
            unsafe {
                job.make(
                    &making.partition,
                    index,
                    making.to.get().expect("set by `find`"),
                )
            };
            // The output of all tasks is visible to the thread that completes the last one.
            if making.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                let targets = making
                    .targets
                    .lock()
                    .take()
                    .expect("the last task is completed once");
                // SAFETY: all tasks are complete.
                let made = unsafe { job.finish(targets) };
                keep(&made);
                let held = made.iter().map(WeakTensor::of).collect();
                let _ = making.made.set(made);
                *self.state.lock() = BuildState::Made(held);
                self.changed.notify_all();
            }
            mem::forget(failing);
        }
    }

    /// Returns the results if they exist; otherwise the results that are being built, which this
    /// call begins if necessary.
    fn find(
        &self,
        job: &impl PartitionedJob<Partition = C>,
        owner: &Owner,
    ) -> Result<Vec<FlexTensor>, Arc<Making<C>>> {
        // If some of several tensors are still alive, these may be their last handles, which are
        // dropped outside the lock.
        let found: Vec<Option<FlexTensor>>;
        let mut state = self.state.lock();
        match &*state {
            BuildState::Making(making) => return Err(making.clone()),
            BuildState::Made(held) => {
                found = held.iter().map(WeakTensor::get).collect();
                if found.iter().all(Option::is_some) {
                    return Ok(found.into_iter().flatten().collect());
                }
            }
            BuildState::Open => {}
        }
        if owner.keep == ResultRetention::Latest {
            // Before new memory is allocated.
            owner.cache.make_room(owner.op, owner.cached);
        }
        let (targets, partition, count) = job.begin(&owner.cache.home);
        let making = Arc::new(Making {
            partition,
            count,
            to: OnceLock::new(),
            targets: Mutex::new(Some(targets)),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(count),
            made: OnceLock::new(),
            has_failed: AtomicBool::new(false),
        });
        // Only now the targets have their final addresses.
        let to = making.targets.lock().as_mut().map(OutputBuffers::ptrs);
        making
            .to
            .get_or_init(|| to.expect("the targets are kept until the result is complete"));
        *state = BuildState::Making(making.clone());
        Err(making)
    }
}

/// Guard that is dropped if a thread panics during a task. The other ranks then start from scratch.
struct Failing<'a, C> {
    of: &'a CooperativeResult<C>,
    making: &'a Arc<Making<C>>,
}

impl<C> Drop for Failing<'_, C> {
    fn drop(&mut self) {
        let mut state = self.of.state.lock();
        if matches!(&*state, BuildState::Making(making) if Arc::ptr_eq(making, self.making)) {
            *state = BuildState::Open;
        }
        self.making.has_failed.store(true, Ordering::Release);
        drop(state);
        self.of.changed.notify_all();
    }
}

/// Cache of the results that ranks of a process share.
pub(super) struct SharedResultCache {
    /// Policy by which ranks spin or yield before they sleep.
    spin: SpinPolicy,
    /// Pool of the memory of shared results.
    home: Arc<HostMemoryPool>,
    /// Latest collective of each group whose results are cached; reductions are not included.
    latest: Mutex<HashMap<GroupKey, (u64, Weak<CachedResults>)>>,
}

/// Handles to the results of one collective.
#[derive(Default)]
pub(super) struct CachedResults(Mutex<Vec<FlexTensor>>);

/// Time for which results are kept for other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum ResultRetention {
    /// Until the next gather of the group.
    Latest,
    /// Until all ranks have taken them.
    All,
}

/// Owner of the shared results of one collective, as one rank uses it.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Owner<'a> {
    pub(super) cache: &'a SharedResultCache,
    pub(super) op: OpHandle,
    pub(super) cached: &'a Arc<CachedResults>,
    pub(super) keep: ResultRetention,
    /// Time that the rank has waited for others.
    pub(super) waited: &'a Cell<Duration>,
}

impl SharedResultCache {
    /// Creates a cache, with the memory pool of the cache `before`, if there is one.
    pub fn new(spin: SpinPolicy, before: Option<&Self>) -> Self {
        let home = before.map(|before| before.home.clone()).unwrap_or_default();
        Self {
            spin,
            home,
            latest: Mutex::default(),
        }
    }

    /// Makes `cached` the latest of its group, and evicts the results of an earlier one before new
    /// memory is allocated. Returns false if there is a later one, so that nothing may be cached in
    /// `cached`.
    fn make_room(
        &self,
        OpHandle { group, seq, .. }: OpHandle,
        cached: &Arc<CachedResults>,
    ) -> bool {
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

impl std::fmt::Debug for CachedResults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&*self.0.lock()).finish()
    }
}

impl<C> std::fmt::Debug for CooperativeResult<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CooperativeResult").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
