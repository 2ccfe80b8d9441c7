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
//! A rank that has taken a task may be delayed: by another program, or by other work of its thread pool. A rank
//! that has waited for it while [no task was completed](SharedResultCache::patience) builds the result alone, for
//! itself.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType};

use super::super::sync::{Condvar, Mutex};
use super::result_cache::{Owner, SharedResultCache};
use crate::kernels::flex::{OutputBuffers, OutputPtrs};
use crate::memory::HostMemoryPool;

/// Work that is divided into tasks.
///
/// # Safety
/// The tasks cover all elements of the results, and no two tasks write the same element.
pub(super) unsafe trait PartitionedJob {
    /// Data that describes the division into tasks.
    type Partition: Send + Sync;

    /// Allocates memory, and divides the work. Returns the memory, the division, and the number of tasks, which is
    /// at least one.
    fn begin(&self, home: &Arc<HostMemoryPool>) -> (OutputBuffers, Self::Partition, usize);

    /// Performs task `index` and writes to the memory at `to`.
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
    /// Next task that no rank has taken.
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

impl<C> CooperativeResult<C> {
    /// Returns the results of `job`: builds them with the other ranks that wait, or takes handles if they exist.
    ///
    /// # Safety
    /// All jobs with which this is called have the same results.
    pub unsafe fn get(&self, job: &impl PartitionedJob<Partition = C>, owner: Owner) -> Vec<FlexTensor> {
        loop {
            let making = match self.find(job, owner) {
                Ok(made) => return made,
                Err(making) => making,
            };
            while let Some(index) = making.take() {
                let failing = Failing { of: self, making: &making };
                // SAFETY: the task was taken once, and all jobs are equal.
                unsafe {
                    if making.make(job, index) {
                        self.put(&making, making.finish(job), owner);
                    }
                }
                mem::forget(failing);
            }
            let has_come = owner.wait(|| self.await_others(&making, owner.shelf));
            match making.made.get() {
                Some(made) => return made.clone(),
                None if has_come => {}
                None => return alone(job, owner),
            }
        }
    }

    /// Returns the results if they exist; otherwise the results that are being built, which this call begins if
    /// necessary.
    fn find(&self, job: &impl PartitionedJob<Partition = C>, owner: Owner) -> Result<Vec<FlexTensor>, Arc<Making<C>>> {
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
    fn put(&self, making: &Making<C>, made: Vec<FlexTensor>, owner: Owner) {
        owner.keep(&made);
        let held = made.iter().map(WeakTensor::of).collect();
        let _ = making.made.set(made);
        *self.state.lock() = BuildState::Made(held);
        self.changed.notify_all();
    }

    /// Waits until the other ranks have completed their tasks or one of them has failed. Returns false if no task
    /// was completed for so long that the wait might not end.
    fn await_others(&self, making: &Making<C>, shelf: &SharedResultCache) -> bool {
        let patience_ends = || Instant::now() + shelf.patience;
        shelf.lingers.pass(patience_ends(), || !making.is_over());
        let mut before = making.left.load(Ordering::Relaxed);
        let mut state = self.state.lock();
        while !making.is_over() {
            let is_late;
            (state, is_late) = self.changed.wait_until(state, patience_ends());
            let left = making.left.load(Ordering::Relaxed);
            if is_late && left == before {
                return making.is_over();
            }
            before = left;
        }
        true
    }
}

/// Builds the results of `job` for this rank alone.
fn alone<C>(job: &impl PartitionedJob<Partition = C>, owner: Owner) -> Vec<FlexTensor> {
    let making = Making::begin(job, owner.home());
    // SAFETY: each task is performed here, once.
    unsafe {
        (0..making.count).for_each(|index| _ = making.make(job, index));
        making.finish(job)
    }
}

/// Guard that is dropped if a rank panics during a task. The other ranks then start from scratch.
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
