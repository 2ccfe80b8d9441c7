//! Bandwidth of thread-rank collectives, beside memcpy in the same run.
//!
//! Two ranks. Every figure is GB of *output* per rank and second, best of many rounds:
//!
//! - `warm`: two threads copy at the same time, each into a buffer it has already written;
//! - `fresh`: the same into new memory on every call, which is what a collective returns;
//! - `add`: two threads add two buffers into new memory, the least a reduce-scatter can do;
//! - an all-gather's percentage is of `fresh`, a reduce-scatter's of `add`.
//!
//! The allocator is mimalloc, which keeps freed pages: the C library returns large blocks to the
//! system, and then page faults are all that there is to measure.
//!
//! Run with `cargo bench --bench collectives`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use burn_dtensor::comm::{Communicator, Launch, ReduceOp, Sharded, World, launch};
use burn_dtensor::placement::Cut;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const RANKS: usize = 2;
const MIB: usize = 1 << 20;
const COLUMNS: usize = 1024;

/// One call on one rank.
type Step = Box<dyn FnMut()>;

fn main() {
    let barrier = measure(MIB, |world| {
        let comm = world.all();
        Box::new(move || comm.barrier("barrier".into()).wait().expect("both ranks meet"))
    });
    println!("{RANKS} ranks; a barrier takes {:.1} us; GB of output per rank and second:\n", barrier * 1e6);
    print!("{:>5} {:>7} {:>7} {:>7}", "MiB", "warm", "fresh", "add");
    for name in ["gather dim 0", "gather dim 1", "scatter dim 0", "scatter dim 1", "scatter bf16"] {
        print!(" {name:>15}");
    }
    println!();
    for mib in [1, 4, 16, 64, 256] {
        row(mib * MIB);
    }
}

fn row(bytes: usize) {
    let speed =
        |output: usize, prepare: &(dyn Fn(&World) -> Step + Sync)| output as f64 / measure(bytes, prepare) / 1e9;
    let part = bytes / RANKS;
    let warm = speed(bytes, &|world| copy_warm(bytes, world));
    let fresh = speed(bytes, &|world| copy_fresh(bytes, world));
    let add = speed(part, &|world| add_fresh(part, world));
    print!("{:>5} {warm:>7.2} {fresh:>7.2} {add:>7.2}", bytes / MIB);
    let beside = |speed: f64, peer: f64| print!(" {speed:>8.2} ({:>3.0} %)", 100.0 * speed / peer);
    beside(speed(bytes, &|world| gather(bytes, 0, world)), fresh);
    beside(speed(bytes, &|world| gather(bytes, 1, world)), fresh);
    beside(speed(part, &|world| scatter(bytes, 0, DType::F32, world)), add);
    beside(speed(part, &|world| scatter(bytes, 1, DType::F32, world)), add);
    beside(speed(part, &|world| scatter(bytes, 0, DType::BF16, world)), add);
    println!();
}

/// Seconds of one step on both ranks at once: the best of many rounds.
fn measure(bytes: usize, prepare: impl Fn(&World) -> Step + Sync) -> f64 {
    let repeats = (16 * MIB / bytes).clamp(1, 8);
    let rounds = (4096 * MIB / (bytes * repeats)).clamp(12, 400);
    let seconds = launch(Launch::threads(RANKS), |world| {
        let mut step = prepare(world);
        let mut best = Duration::MAX;
        for _ in 0..rounds {
            world.barrier("start")?;
            let start = Instant::now();
            (0..repeats).for_each(|_| step());
            world.barrier("end")?;
            best = best.min(start.elapsed());
        }
        Ok(best.as_secs_f64() / repeats as f64)
    });
    let ranks = seconds.unwrap_or_else(|error| panic!("{error}")).into_iter();
    ranks.map(|(_, seconds)| seconds).fold(0.0, f64::max)
}

fn buffer(bytes: usize, world: &World) -> Vec<f32> {
    vec![world.rank() as f32 + 1.0; bytes / 4]
}

fn copy_warm(bytes: usize, world: &World) -> Step {
    let (from, mut to) = (buffer(bytes, world), buffer(bytes, world));
    Box::new(move || {
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
    })
}

fn copy_fresh(bytes: usize, world: &World) -> Step {
    let from = buffer(bytes, world);
    Box::new(move || drop(black_box(black_box(&from).clone())))
}

fn add_fresh(bytes: usize, world: &World) -> Step {
    let (a, b) = (buffer(bytes, world), buffer(bytes, world));
    Box::new(move || {
        let sums: Vec<f32> = black_box(&a).iter().zip(black_box(&b)).map(|(a, b)| a + b).collect();
        drop(black_box(sums));
    })
}

/// An all-gather of a matrix of `bytes`.
fn gather(bytes: usize, dim: usize, world: &World) -> Step {
    let whole = [bytes / 4 / COLUMNS, COLUMNS];
    let mut piece = whole;
    piece[dim] /= RANKS;
    let tensor = Tensor::<2>::full(piece, 1.0, world.device()).into_dispatch();
    let comm: Communicator = world.all();
    Box::new(move || {
        let shard = Sharded { tensor: tensor.clone(), dim, cut: Cut::Chunks(whole[dim]) };
        let work = comm.all_gather("gather".into(), vec![shard]);
        drop(black_box(work.wait().expect("both ranks gather")));
    })
}

/// A reduce-scatter of a matrix of `bytes`.
fn scatter(bytes: usize, dim: usize, dtype: DType, world: &World) -> Step {
    let shape = [bytes / dtype.size() / COLUMNS, COLUMNS];
    let tensor = Tensor::<2>::full(shape, 1.0, (world.device(), dtype)).into_dispatch();
    let comm: Communicator = world.all();
    Box::new(move || {
        let shard = Sharded { tensor: tensor.clone(), dim, cut: Cut::Chunks(shape[dim]) };
        let work = comm.reduce_scatter("scatter".into(), vec![shard], ReduceOp::Sum);
        drop(black_box(work.wait().expect("both ranks reduce")));
    })
}
