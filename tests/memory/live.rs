//! Live bytes, by a counting allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::World;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::{Counter, count_blocks};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// What is live that was allocated for each rank, and for none, whoever frees it.
static OF_RANK: [Account; MAX_RANKS + 1] = [const { Account::new() }; MAX_RANKS + 1];
/// The account of threads that are no rank's.
const NO_RANK: usize = MAX_RANKS;
const MAX_RANKS: usize = 4;

struct Account {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl Account {
    const fn new() -> Self {
        Self {
            live: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
        }
    }
}

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static ACCOUNT: Cell<usize> = const { Cell::new(NO_RANK) };
}

/// Room before what is allocated, for the number of an account.
fn room(layout: Layout) -> usize {
    layout.align().max(16)
}

/// With that room.
fn with_room(layout: Layout) -> Layout {
    let room = room(layout);
    // SAFETY: a power of two, and no more than the address space with what a page or so adds to a
    // size that fits it.
    unsafe { Layout::from_size_align_unchecked(layout.size() + room, room) }
}

/// So many bytes more are live, of the account that has this number.
fn taken(size: usize) -> usize {
    let live = LIVE.fetch_add(size, SeqCst) + size;
    PEAK.fetch_max(live, SeqCst);
    let number = ACCOUNT.get();
    let account = &OF_RANK[number];
    let own = account.live.fetch_add(size, SeqCst) + size;
    account.peak.fetch_max(own, SeqCst);
    number
}

/// So many bytes of this account are live no more.
fn given_back(size: usize, number: usize) {
    LIVE.fetch_sub(size, SeqCst);
    OF_RANK[number].live.fetch_sub(size, SeqCst);
}

// SAFETY: every call is the system allocator's, for as much room more before the memory as that is
// aligned to; the counters do not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the size is not 0.
        let memory = unsafe { System.alloc(with_room(layout)) };
        if memory.is_null() {
            return memory;
        }
        let number = taken(layout.size());
        // SAFETY: the room is in front, as large as a number at least, and aligned for one.
        unsafe {
            memory.cast::<usize>().write(number);
            memory.add(room(layout))
        }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `alloc` has left the room in front, with the number in it.
        let (memory, number) = unsafe {
            let memory = ptr.sub(room(layout));
            (memory, memory.cast::<usize>().read())
        };
        given_back(layout.size(), number);
        // SAFETY: so it was allocated.
        unsafe { System.dealloc(memory, with_room(layout)) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One measurement at a time: the counters are the process's. Of large tensors' memory, too, which
/// is not the allocator's.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    count_blocks(Counter { taken, given_back });
    ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Bytes that are live in the whole process.
pub fn live() -> usize {
    LIVE.load(SeqCst)
}

/// From now on what this thread allocates is `rank`'s.
pub fn allocates_for(rank: usize) {
    ACCOUNT.set(rank);
}

/// Bytes that are live of what this thread's rank has allocated.
pub fn own() -> usize {
    OF_RANK[ACCOUNT.get()].live.load(SeqCst)
}

/// The most that was live, since [`restart_peak`], of what this thread's rank has allocated.
pub fn own_peak() -> usize {
    OF_RANK[ACCOUNT.get()].peak.load(SeqCst)
}

/// What is live counts as the most that was.
pub fn restart_peak() {
    let account = &OF_RANK[ACCOUNT.get()];
    account.peak.store(account.live.load(SeqCst), SeqCst);
}

/// So many threads, each of which takes what a rank on a machine of its own does.
pub fn apart(ranks: usize) -> Launch {
    Launch::threads(ranks).with_separate_memory()
}

/// How many allocations this thread makes in `program`.
pub fn allocations<T>(program: impl FnOnce() -> T) -> (T, usize) {
    let before = ALLOCATIONS.get();
    let result = program();
    (result, ALLOCATIONS.get() - before)
}

/// What the process held at most, beyond what it held before, while every rank ran `program`.
pub fn peak<T>(world: &World, program: impl FnOnce() -> Result<T>) -> Result<(T, usize)> {
    world.barrier("before")?;
    let before = LIVE.load(SeqCst);
    world.run_on(0, || PEAK.store(before, SeqCst));
    world.barrier("begin")?;
    let result = program()?;
    world.barrier("end")?;
    let peak = PEAK.load(SeqCst) - before;
    world.barrier("measured")?;
    Ok((result, peak))
}

/// What one rank holds, above what it held before it had a model.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub before: usize,
    pub after_forward: usize,
    pub peak_backward: usize,
    pub after_backward: usize,
}

/// Three steps of the model that `make` distributes, on this many ranks; the last one is measured.
pub fn measure<M: Module>(
    ranks: usize,
    checkpointing: bool,
    make: impl Fn(&World, &Device) -> Result<M> + Sync,
    loss: impl Fn(&M, &Device) -> Tensor<1> + Sync,
) -> Measured {
    let measured = launch(apart(ranks), |world| {
        let device = world.device().clone().autodiff();
        let device = if checkpointing {
            device.gradient_checkpointing()
        } else {
            device
        };
        let settle = |world: &World| {
            world.barrier("measure")?;
            let live = LIVE.load(SeqCst);
            world.barrier("measured")?;
            Ok::<_, Error>(live)
        };
        // What the matrix products allocate once per thread, and keep.
        let warm = LinearConfig::new(512, 512).init(&device);
        drop(
            warm.forward(Tensor::<3>::ones([1, 2, 512], &device))
                .sum()
                .backward(),
        );
        drop(warm);
        let empty = settle(world)?;
        let model = make(world, &device)?;
        let mut last = None;
        // The first step warms up what is allocated once.
        for _ in 0..3 {
            let before = settle(world)?;
            let loss = loss(&model, &device);
            let after_forward = settle(world)?;
            if world.rank() == 0 {
                PEAK.store(LIVE.load(SeqCst), SeqCst);
            }
            world.barrier("peak")?;
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            world.barrier("backward")?;
            let peak_backward = PEAK.load(SeqCst);
            let after_backward = settle(world)?;
            drop(grads);
            // What an earlier graph has left in burn's tables goes with the next backward:
            // differences do not change.
            let empty = [empty, before, after_forward, after_backward]
                .into_iter()
                .min()
                .expect("there are some");
            let rank = |live: usize| (live - empty) / ranks;
            last = Some(Measured {
                before: rank(before),
                after_forward: rank(after_forward),
                peak_backward: rank(peak_backward),
                after_backward: rank(after_backward),
            });
            world.barrier("next")?;
        }
        Ok(last.expect("three steps ran"))
    })
    .unwrap();
    measured[0].1
}
