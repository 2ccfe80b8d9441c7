//! [`CooperativeResult`]: a result that is identical on all ranks of a process, built by the ranks that wait for
//! it, and stored once.
//!
//! The work is divided into tasks. Each rank takes tasks until none remain. A rank that arrives later takes a
//! handle.
//!
//! ```text
//! rank 0   waits: | task 0 | task 2 | task 3 |  a handle
//! rank 1              waits: |  task 1    |     a handle
//! rank 2                                           waits: a handle
//! ```
//!
//! A tensor is a handle in any case, and burn writes in place only through a unique handle. If two ranks share a
//! result, the first that writes gets a private copy. Sharing therefore affects only time and memory.
//!
//! 1. All threads of a rank's pool take tasks.
//! 2. A thread that has taken a task does nothing else before the task is complete, so no task waits for other work
//!    of the thread's pool. A rank therefore waits for tasks of others without a deadline: they are short, and a
//!    thread that panics in one ends the wait.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType};

use super::result_cache::{Owner, ResultOwner};
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

    /// Allocates memory, and divides the work. Returns the memory, the division, and the number of tasks, which is
    /// at least one.
    fn begin(&self, home: &Arc<HostMemoryPool>) -> (OutputBuffers, Self::Partition, usize);

    /// Performs task `index` on the calling thread alone, and writes to the memory at `to`.
    ///
    /// # Safety
    /// `sizes` and `to` are from one [`begin`](Self::begin). No other thread performs this task, and no thread
    /// reads its output.
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
        Self { data: Arc::downgrade(&tensor.data_arc()), layout: tensor.layout().clone(), dtype: tensor.dtype() }
    }

    fn get(&self) -> Option<FlexTensor> {
        Some(FlexTensor::from_arc(self.data.upgrade()?, self.layout.clone(), self.dtype))
    }
}

impl<C> Making<C> {
    fn begin(job: &impl PartitionedJob<Partition = C>, home: &Arc<HostMemoryPool>) -> Arc<Self> {
        let (targets, partition, count) = job.begin(home);
        let this = Arc::new(Self {
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
        let to = this.targets.lock().as_mut().map(OutputBuffers::ptrs);
        this.to.get_or_init(|| to.expect("the targets are kept until the result is complete"));
        this
    }

    /// Takes the next task for the caller to perform.
    fn take(&self) -> Option<usize> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.count && !self.has_failed.load(Ordering::Relaxed)).then_some(index)
    }

    /// Performs task `index`. Returns true if all tasks are complete, and their output is visible to the caller.
    ///
    /// # Safety
    /// Only the caller has taken the task. `job` is the job that has begun `self`, or an equal job of another rank.
    unsafe fn make(&self, job: &impl PartitionedJob<Partition = C>, index: usize) -> bool {
        let to = self.to.get().expect("set by `begin`");
        // SAFETY: the caller guarantees it; no rank has the results before all tasks are complete.
        unsafe { job.make(&self.partition, index, to) };
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Returns the results.
    ///
    /// # Safety
    /// All tasks are complete. `job` is the job that has begun `self`, or an equal job of another rank.
    unsafe fn finish(&self, job: &impl PartitionedJob<Partition = C>) -> Vec<FlexTensor> {
        let targets = self.targets.lock().take().expect("the last task is completed once");
        // SAFETY: the caller guarantees it.
        unsafe { job.finish(targets) }
    }

    fn is_over(&self) -> bool {
        self.made.get().is_some() || self.has_failed.load(Ordering::Acquire)
    }
}

impl<C> Default for CooperativeResult<C> {
    fn default() -> Self {
        Self { state: Mutex::new(BuildState::Open), changed: Condvar::default() }
    }
}

impl<C: Send + Sync> CooperativeResult<C> {
    /// Returns the results of `job`: builds them with the other ranks that wait, or takes handles if they exist.
    ///
    /// # Safety
    /// All jobs with which this is called have the same results.
    pub unsafe fn get(&self, job: &impl PartitionedJob<Partition = C>, owner: Owner) -> Vec<FlexTensor> {
        loop {
            let making = match self.find(job, &owner.results) {
                Ok(made) => return made,
                Err(making) => making,
            };
            let work = || {
                // SAFETY: all jobs are equal.
                unsafe { self.work(&making, job, &owner.results) }
            };
            match rayon::current_num_threads() {
                // Only threads of a rank's pool may wait for jobs of that pool.
                threads if threads > 1 && rayon::current_thread_index().is_some() => rayon::in_place_scope(|scope| {
                    (1..threads).for_each(|_| scope.spawn(|_| work()));
                    work();
                }),
                _ => work(),
            }
            owner.wait(|| self.await_others(&making, owner.results.cache.spin));
            if let Some(made) = making.made.get() {
                return made.clone();
            }
        }
    }

    /// Performs tasks until all are taken. The thread that completes the last one publishes the results.
    ///
    /// # Safety
    /// `job` is the job that has begun `making`, or an equal job of another rank.
    unsafe fn work(&self, making: &Arc<Making<C>>, job: &impl PartitionedJob<Partition = C>, owner: &ResultOwner) {
        while let Some(index) = making.take() {
            let failing = Failing { of: self, making };
            // SAFETY: the task was taken once, and the caller guarantees the rest.
            unsafe {
                if making.make(job, index) {
                    self.put(making, making.finish(job), owner);
                }
            }
            mem::forget(failing);
        }
    }

    /// Returns the results if they exist; otherwise the results that are being built, which this call begins if
    /// necessary.
    fn find(
        &self,
        job: &impl PartitionedJob<Partition = C>,
        owner: &ResultOwner,
    ) -> Result<Vec<FlexTensor>, Arc<Making<C>>> {
        // If some of several tensors are still alive, these may be their last handles, which are dropped outside
        // the lock.
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
        owner.begin();
        let making = Making::begin(job, owner.home());
        *state = BuildState::Making(making.clone());
        Err(making)
    }

    /// Publishes the results, which all ranks have completed.
    fn put(&self, making: &Making<C>, made: Vec<FlexTensor>, owner: &ResultOwner) {
        owner.keep(&made);
        let held = made.iter().map(WeakTensor::of).collect();
        let _ = making.made.set(made);
        *self.state.lock() = BuildState::Made(held);
        self.changed.notify_all();
    }

    /// Waits until the other threads have completed their tasks or one of them has failed.
    fn await_others(&self, making: &Making<C>, spin: SpinPolicy) {
        let until = Instant::now() + LONGEST;
        spin.pass(until, || !making.is_over());
        let mut state = self.state.lock();
        while !making.is_over() {
            (state, _) = self.changed.wait_until(state, until);
        }
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

impl<C> std::fmt::Debug for CooperativeResult<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CooperativeResult").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
