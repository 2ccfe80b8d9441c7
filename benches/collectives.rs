//! Bandwidth of thread-rank collectives, beside memcpy in the same run.
//!
//! Two ranks. Every figure is GB of *output* per rank and second; the ratio is to memcpy:
//!
//! - `warm`: two threads copy at the same time, each into a buffer it has already written;
//! - `fresh`: the same into new memory on every call, which is what a collective returns.
//!
//! A reduce-scatter of two ranks reads two bytes for each one it writes, a copy one: `add` is two
//! threads adding two buffers into fresh memory, the least that it can do.
//!
//! Run with `cargo bench --bench collectives`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_dtensor::Error;
use burn_dtensor::comm::{Communicator, Launch, ReduceOp, Sharded, World, launch};

#[global_allocator]
static A: mimalloc::MiMalloc = mimalloc::MiMalloc;
const RANKS: usize = 2;
const MIB: usize = 1 << 20;
const COLUMNS: usize = 1024;

fn main() {
    println!("{RANKS} ranks, GB of output per rank and second (ratio to fresh memcpy; of reduce-scatter, to add)");
    println!(
        "{:>7} {:>8} {:>8} {:>8}   {:>16} {:>16} {:>16} {:>16} {:>16}",
        "MiB",
        "warm",
        "fresh",
        "add",
        "gather dim 0",
        "gather dim 1",
        "scatter f32 d0",
        "scatter f32 d1",
        "scatter bf16 d0"
    );
    for mib in [1, 4, 16, 64, 256] {
        row(mib);
    }
}

fn row(mib: usize) {
    let bytes = mib * MIB;
    let part = bytes / RANKS;
    let warm = gbps(
        bytes,
        measure(
            bytes,
            |world| (buffer(bytes, world), buffer(bytes, world)),
            |_, (from, to)| {
                to.copy_from_slice(black_box(from));
                black_box(to);
            },
        ),
    );
    let fresh = gbps(bytes, measure(bytes, |world| buffer(bytes, world), |_, from| drop(black_box(from.clone()))));
    let add = gbps(
        part,
        measure(
            bytes,
            |world| (buffer(part, world), buffer(part, world)),
            |_, (a, b)| {
                drop(black_box(a.iter().zip(&*b).map(|(a, b)| a + b).collect::<Vec<f32>>()));
            },
        ),
    );
    let gather = [0, 1].map(|dim| {
        let whole = [bytes / 4 / COLUMNS, COLUMNS];
        let piece = |world: &World| {
            let mut shape = whole;
            shape[dim] /= RANKS;
            filled(shape, world)
        };
        gbps(
            bytes,
            measure(bytes, piece, |comm, tensor| {
                let shard = Sharded { tensor: tensor.clone(), dim, len: whole[dim] };
                drop(black_box(comm.all_gather("gather".into(), vec![shard]).wait().expect("both ranks gather")));
            }),
        )
    });
    let scatter = |dim: usize, half: bool| {
        let size = if half { 2 } else { 4 };
        let shape = [bytes / size / COLUMNS, COLUMNS];
        let whole = |world: &World| match half {
            true => Tensor::<2>::full(shape, 1.0, (world.device(), burn::tensor::DType::BF16)).into_dispatch(),
            false => filled(shape, world),
        };
        gbps(
            part,
            measure(bytes, whole, |comm, tensor| {
                let shard = Sharded { tensor: tensor.clone(), dim, len: shape[dim] };
                let work = comm.reduce_scatter("scatter".into(), vec![shard], ReduceOp::Sum);
                drop(black_box(work.wait().expect("both ranks reduce")));
            }),
        )
    };
    let scatter = [scatter(0, false), scatter(1, false), scatter(0, true)];
    print!("{mib:>7} {warm:>8.2} {fresh:>8.2} {add:>8.2}  ");
    gather.iter().for_each(|g| print!(" {g:>8.2} ({:>4.0}%)", 100.0 * g / fresh));
    scatter.iter().for_each(|s| print!(" {s:>8.2} ({:>4.0}%)", 100.0 * s / add));
    println!();
}

/// Seconds of `step` on two ranks at once: the best of several rounds.
fn measure<I>(
    bytes: usize,
    prepare: impl Fn(&World) -> I + Sync,
    step: impl Fn(&dyn Communicator, &mut I) + Sync,
) -> f64 {
    let repeats = (64 * MIB / bytes).clamp(2, 32);
    let seconds = launch(Launch::threads(RANKS), |world| {
        let comm = world.all();
        let mut input = prepare(world);
        let mut best = Duration::MAX;
        for _ in 0..9 {
            world.barrier("start")?;
            let start = Instant::now();
            for _ in 0..repeats {
                step(comm.as_ref(), &mut input);
            }
            world.barrier("end")?;
            best = best.min(start.elapsed());
        }
        Ok::<_, Error>(best.as_secs_f64() / repeats as f64)
    });
    seconds.unwrap_or_else(|error| panic!("{error}")).into_iter().fold(0.0, f64::max)
}

fn gbps(bytes: usize, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e9
}

fn buffer(bytes: usize, world: &World) -> Vec<f32> {
    vec![world.rank() as f32 + 1.0; bytes / 4]
}

fn filled(shape: [usize; 2], world: &World) -> DispatchTensor {
    Tensor::<2>::full(shape, world.rank() as f32, world.device()).into_dispatch()
}
