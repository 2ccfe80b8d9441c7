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
//!
//! With `--ranks` the question is another: how the time of one collective grows with the number of ranks, whatever
//! the number of cores.
//!
//! ```text
//! cargo bench --bench collectives -- --ranks 64,128,256
//! ```
//!
//! What the ranks do together grows as fast as they, and so does the time once there are more of them than cores;
//! what grows faster is overhead: ours, or that of so many threads, which `std::sync::Barrier` and a copy of as many
//! bytes on every rank show. The numbers of ranks take turns, so that whatever else the machine does meets all alike.

use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use burn_dtensor::comm::{Communicator, Launch, ReduceOp, Sharded, World, launch};
use burn_dtensor::placement::Cut;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const RANKS: usize = 2;
const MIB: usize = 1 << 20;
const COLUMNS: usize = 1024;

/// How often each number of ranks has its turn.
const TURNS: usize = 5;

#[derive(Parser)]
#[command(about = "Bandwidth of the collectives of two thread ranks, beside memcpy in the same run")]
struct Cli {
    /// Instead the microseconds of a barrier, of an all-reduce of 1 MiB on every rank, and of an all-gather of a whole
    /// of 1 MiB, at each of these numbers of ranks, such as 64,128,256; in brackets beside the first one
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Vec<u32>,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// One call on one rank.
type Step = Box<dyn FnMut()>;

/// What makes a rank's step; all ranks share the barrier.
type Prepare = fn(&World, &Arc<Barrier>) -> Step;

fn main() {
    match &Cli::parse().ranks[..] {
        [] => bandwidth(),
        ranks => growth(&ranks.iter().map(|ranks| *ranks as usize).collect::<Vec<_>>()),
    }
}

/// Prints the time of each collective at each of `ranks`.
fn growth(ranks: &[usize]) {
    print!("us, best of many; in brackets beside {} ranks\n\n{:>18}", ranks[0], "ranks");
    ranks.iter().for_each(|ranks| print!(" {ranks:>16}"));
    println!();
    let cases: [(&str, Prepare); 5] = [
        ("std barrier", |_, peer| {
            let peer = Arc::clone(peer);
            Box::new(move || _ = peer.wait())
        }),
        ("barrier", |world, _| barrier(world)),
        ("copy 1 MiB", |world, _| copy_fresh(MIB, world)),
        ("all-reduce 1 MiB", |world, _| all_reduce(MIB, world)),
        ("all-gather 1 MiB", |world, _| gather(MIB, 0, world)),
    ];
    for (name, prepare) in cases {
        let mut best = vec![f64::MAX; ranks.len()];
        for _ in 0..TURNS {
            for (best, ranks) in best.iter_mut().zip(ranks) {
                let peer = Arc::new(Barrier::new(*ranks));
                *best = best.min(best_of(3, (4096 / ranks).max(8), *ranks, |world| prepare(world, &peer)));
            }
        }
        print!("{name:>18}");
        best.iter().for_each(|seconds| print!(" {:>9.0} ({:>4.2})", seconds * 1e6, seconds / best[0]));
        println!();
    }
}

/// Prints the bandwidth of each collective of two ranks.
fn bandwidth() {
    let barrier = measure(MIB, barrier);
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

/// Seconds of one step of `bytes` on both ranks at once.
fn measure(bytes: usize, prepare: impl Fn(&World) -> Step + Sync) -> f64 {
    let repeats = (16 * MIB / bytes).clamp(1, 8);
    best_of((4096 * MIB / (bytes * repeats)).clamp(12, 400), repeats, RANKS, prepare)
}

/// Seconds of one step on all ranks at once: the best of `rounds`, each of so many `repeats`.
fn best_of(rounds: usize, repeats: usize, ranks: usize, prepare: impl Fn(&World) -> Step + Sync) -> f64 {
    let seconds = launch(Launch::threads(ranks), |world| {
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

fn barrier(world: &World) -> Step {
    let comm = world.all();
    Box::new(move || comm.barrier("barrier".into()).wait().expect("all ranks meet"))
}

/// An all-reduce of `bytes` on every rank.
fn all_reduce(bytes: usize, world: &World) -> Step {
    let tensor = Tensor::<1>::full([bytes / 4], 1.0, world.device()).into_dispatch();
    let comm = world.all();
    Box::new(move || {
        let work = comm.all_reduce("reduce".into(), vec![tensor.clone()], ReduceOp::Sum);
        drop(black_box(work.wait().expect("all ranks reduce")));
    })
}

/// An all-gather of a matrix of `bytes`.
fn gather(bytes: usize, dim: usize, world: &World) -> Step {
    let whole = [bytes / 4 / COLUMNS, COLUMNS];
    let cut = Cut::Chunks(whole[dim]);
    let mut piece = whole;
    piece[dim] = cut.range(world.size(), world.rank()).len();
    let tensor = Tensor::<2>::full(piece, 1.0, world.device()).into_dispatch();
    let comm: Communicator = world.all();
    Box::new(move || {
        let shard = Sharded { tensor: tensor.clone(), dim, cut: cut.clone() };
        let work = comm.all_gather("gather".into(), vec![shard]);
        drop(black_box(work.wait().expect("all ranks gather")));
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
