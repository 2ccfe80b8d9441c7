//! [`CooperativeResult`]: a result that all ranks of a process get alike, made by those that wait for it, and there
//! once.
//!
//! Each rank takes pieces of the work until there are none left. Who comes when it is made takes a handle.
//!
//! ```text
//! rank 0   waits: | piece 0 | piece 2 | piece 3 |  a handle
//! rank 1              waits: |  piece 1    |       a handle
//! rank 2                                              waits: a handle
//! ```
//!
//! A tensor is a handle anyway, and burn writes in place to the memory of the only one: which of two ranks writes first
//! gets memory of its own. So nobody notices but by time and memory.
//!
//! A rank that has taken a piece may be kept from making it: by another program, or by what its thread pool does
//! meanwhile. Who has waited for it while [nothing moved](SharedResultCache::patience) makes all by itself, for itself.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType};

use super::super::sync::{Condvar, Mutex};
use super::result_cache::{Owner, SharedResultCache};
use crate::kernels::flex::{Ends, OutputBuffers};
use crate::memory::HostMemoryPool;

/// Bytes that all ranks would move, were each to make its own result, from which on it pays to come to terms.
pub(super) const WORTH: usize = 1 << 20;

/// Pieces for each rank, so that one that is late delays little.
pub(super) const PARTS_PER_RANK: usize = 4;

/// How results are made, piece by piece.
///
/// # Safety
/// The pieces are all of the results, and no two have an element in common.
pub(super) unsafe trait PartitionedJob {
    /// How it is cut into pieces.
    type Partition: Send + Sync;

    /// New memory, how the job is cut, and into how many pieces: at least one.
    fn begin(&self, home: &Arc<HostMemoryPool>) -> (OutputBuffers, Self::Partition, usize);

    /// Writes piece `index` of what begins where `to` says.
    ///
    /// # Safety
    /// `partition` and `to` are of one [`begin`](Self::begin), nobody else writes this piece, and nobody reads.
    unsafe fn make(&self, sizes: &Self::Partition, index: usize, to: &Ends<u8>);

    /// The results.
    ///
    /// # Safety
    /// All pieces are written.
    unsafe fn finish(&self, targets: OutputBuffers) -> Vec<FlexTensor>;
}

/// Results of a [`PartitionedJob`] whose cut is a `C`.
pub(super) struct CooperativeResult<C> {
    state: Mutex<BuildState<C>>,
    changed: Condvar,
}

enum BuildState<C> {
    /// Nobody has begun, or somebody has failed.
    Open,
    Making(Arc<Making<C>>),
    /// For as long as they are there.
    Made(Box<[WeakTensor]>),
}

/// Results that are being made.
struct Making<C> {
    partition: C,
    count: usize,
    /// Where the targets begin, which stay where they are until all is made.
    to: OnceLock<Ends<u8>>,
    targets: Mutex<Option<OutputBuffers>>,
    /// The next piece that nobody has taken.
    next: AtomicUsize,
    /// Pieces that are not made.
    left: AtomicUsize,
    made: OnceLock<Vec<FlexTensor>>,
    has_failed: AtomicBool,
}

/// A tensor, if somebody has a handle.
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
        // Only now they are where they stay.
        let to = this.targets.lock().as_mut().map(OutputBuffers::ends);
        this.to.get_or_init(|| to.expect("they are there until all is made"));
        this
    }

    /// A piece that is the caller's to make.
    fn take(&self) -> Option<usize> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.count && !self.has_failed.load(Ordering::Relaxed)).then_some(index)
    }

    /// Makes piece `index`. True: all are made, and seen here.
    ///
    /// # Safety
    /// Only the caller has taken it, of what this job, or another rank's same one, has begun.
    unsafe fn make(&self, job: &impl PartitionedJob<Partition = C>, index: usize) -> bool {
        let to = self.to.get().expect("known since it was begun");
        // SAFETY: the caller's; nobody has the results before all pieces are made.
        unsafe { job.make(&self.partition, index, to) };
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// The results.
    ///
    /// # Safety
    /// All pieces are made, of what this job, or another rank's same one, has begun.
    unsafe fn finish(&self, job: &impl PartitionedJob<Partition = C>) -> Vec<FlexTensor> {
        let targets = self.targets.lock().take().expect("the last piece is made once");
        // SAFETY: the caller's.
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
    /// The results of `job`, which are `owner`'s: made here, by others, or together.
    ///
    /// # Safety
    /// All jobs that it is called with make the same.
    pub unsafe fn get(&self, job: &impl PartitionedJob<Partition = C>, owner: Owner) -> Vec<FlexTensor> {
        loop {
            let making = match self.find(job, owner) {
                Ok(made) => return made,
                Err(making) => making,
            };
            while let Some(index) = making.take() {
                let failing = Failing { of: self, making: &making };
                // SAFETY: the piece was taken once; all jobs are the same.
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

    /// The results, if they are there; otherwise those that are being made, from now on at least.
    fn find(&self, job: &impl PartitionedJob<Partition = C>, owner: Owner) -> Result<Vec<FlexTensor>, Arc<Making<C>>> {
        // Of several tensors some may be there, until this is the last handle: to be dropped without the lock.
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

    /// Has `made`, which all ranks have made, found from now on.
    fn put(&self, making: &Making<C>, made: Vec<FlexTensor>, owner: Owner) {
        owner.keep(&made);
        let held = made.iter().map(WeakTensor::of).collect();
        let _ = making.made.set(made);
        *self.state.lock() = BuildState::Made(held);
        self.changed.notify_all();
    }

    /// Waits until others have made the pieces that they have taken, or one of them has failed. False: that may take
    /// for ever.
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

/// The results of `job` for this rank alone.
fn alone<C>(job: &impl PartitionedJob<Partition = C>, owner: Owner) -> Vec<FlexTensor> {
    let making = Making::begin(job, owner.home());
    // SAFETY: each piece is made here, once.
    unsafe {
        (0..making.count).for_each(|index| _ = making.make(job, index));
        making.finish(job)
    }
}

/// Dropped by a rank that panics while it makes a piece: others begin anew.
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
