//! Bandwidth of thread-rank collectives, beside threads that copy or add as much in the same run.
//!
//! Every figure is GB of *output* per rank and second, best of many rounds. What it is beside:
//!
//! - of an all-gather and an all-to-all, as many threads that copy as many bytes each into new memory, which is what a
//!   collective returns;
//! - of a reduce-scatter and an all-reduce, as many threads that add the same elements each of as many arrays as there are
//!   ranks into new memory: bf16 in f32, rounded once. Of an all-reduce on more than two ranks each adds its share, and
//!   copies the others'.
//!
//! The allocator is mimalloc, which keeps freed pages, so that memory is equally warm for all: the C library returns
//! large blocks to the system, and then page faults are all that there is to measure.
//!
//! ```text
//! cargo bench --bench collectives                 # 2 ranks
//! cargo bench --bench collectives -- --threads 4
//! ```
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
use std::ops::Range;
use std::sync::{Arc, Barrier};
use std::time::Instant;

use burn::tensor::{DType, Tensor};
use burn_dtensor::comm::{Launch, ReduceOp, Sharded, World, launch};
use burn_dtensor::placement::Cut;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const COLUMNS: usize = 1024;

/// Bytes of the wholes.
const SIZES: [usize; 7] = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB];

/// How often each number of ranks has its turn.
const TURNS: usize = 5;

#[derive(Parser)]
#[command(about = "Bandwidth of the collectives of thread ranks, beside copies and additions in the same run")]
struct Cli {
    /// How many ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..))]
    threads: u32,
    /// Only what has this in its name, such as `reduce-scatter bf16`
    #[arg(long)]
    only: Option<String>,
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
    let cli = Cli::parse();
    match &cli.ranks[..] {
        [] => bandwidth(cli.threads as usize, cli.only.as_deref().unwrap_or_default()),
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
        ("all-reduce 1 MiB", |world, _| all_reduce(MIB, DType::F32, world)),
        ("all-gather 1 MiB", |world, _| gather(MIB, 0, DType::F32, world)),
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

/// What makes a rank's step of a whole of so many bytes.
type OfBytes = Box<dyn Fn(usize, &World) -> Step + Sync>;

/// A collective, and what it is beside.
struct Case {
    name: String,
    /// Bytes of output on each rank, of a whole of so many.
    output: fn(usize, usize) -> usize,
    collective: OfBytes,
    peer: OfBytes,
}

fn cases() -> Vec<Case> {
    let part = |bytes, ranks| bytes / ranks;
    let whole = |bytes, _| bytes;
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        let mut case = |name: &str, output, collective, peer| {
            cases.push(Case { name: format!("{name} {}", dtype.name()), output, collective, peer });
        };
        for dim in [0, 1] {
            let copied = move |bytes, world: &World| copy_fresh(bytes, world);
            let gathered = move |bytes, world: &World| gather(bytes, dim, dtype, world);
            case(&format!("all-gather dim {dim}"), whole, Box::new(gathered), Box::new(copied));
            let copied = move |bytes, world: &World| copy_fresh(bytes / world.size(), world);
            let cut = move |bytes, world: &World| all_to_all(bytes, dim, dtype, world);
            case(&format!("all-to-all dim {dim} to {}", 1 - dim), part, Box::new(cut), Box::new(copied));
            let added = move |bytes, world: &World| add_part(bytes, dim, dtype, world);
            let scattered = move |bytes, world: &World| scatter(bytes, dim, dtype, world);
            case(&format!("reduce-scatter dim {dim}"), part, Box::new(scattered), Box::new(added));
        }
        let copied = move |bytes, world: &World| copy_fresh(bytes / world.size(), world);
        let rows = move |bytes, world: &World| rows_to_all(bytes, dtype, world);
        case("all-to-all of rows", part, Box::new(rows), Box::new(copied));
        let added = move |bytes, world: &World| reduce_fresh(bytes, dtype, world);
        let reduced = move |bytes, world: &World| all_reduce(bytes, dtype, world);
        case("all-reduce", whole, Box::new(reduced), Box::new(added));
    }
    cases
}

/// Prints the bandwidth of each collective whose name has `only` in it.
fn bandwidth(ranks: usize, only: &str) {
    let barrier = measure(MIB, ranks, &|_, world| barrier(world));
    println!(
        "{ranks} ranks; a barrier takes {:.1} us; GB of output per rank and second, and beside its peer:",
        barrier * 1e6
    );
    for Case { name, output, collective, peer } in cases().iter().filter(|case| case.name.contains(only)) {
        println!("\n{name:<28} {:>10} {:>10} {:>7} {:>12}", "collective", "peer", "", "us above it");
        for bytes in SIZES {
            let (own, its) = (measure(bytes, ranks, collective), measure(bytes, ranks, peer));
            let speed = |seconds: f64| output(bytes, ranks) as f64 / seconds / 1e9;
            let size = if bytes < MIB { format!("{} KiB", bytes / KIB) } else { format!("{} MiB", bytes / MIB) };
            let (percent, above) = (100.0 * its / own, (own - its) * 1e6);
            println!("{size:>28} {:>10.2} {:>10.2} {percent:>5.0} % {above:>12.1}", speed(own), speed(its));
        }
    }
}

/// Seconds of one step of `bytes` on all ranks at once.
fn measure(bytes: usize, ranks: usize, prepare: &(dyn Fn(usize, &World) -> Step + Sync)) -> f64 {
    let repeats = (16 * MIB / bytes).clamp(1, 8);
    best_of((2048 * MIB / (bytes * repeats)).clamp(8, 400), repeats, ranks, |world| prepare(bytes, world))
}

/// Seconds of one step on all ranks: the best of `rounds`, each of so many `repeats`, from the first rank's start to the
/// last one's end.
fn best_of(rounds: usize, repeats: usize, ranks: usize, prepare: impl Fn(&World) -> Step + Sync) -> f64 {
    let spans = launch(Launch::threads(ranks), |world| {
        let mut step = prepare(world);
        let mut spans = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            world.barrier("start")?;
            let start = Instant::now();
            (0..repeats).for_each(|_| step());
            spans.push((start, Instant::now()));
            world.barrier("end")?;
        }
        Ok(spans)
    });
    let spans: Vec<_> = spans.unwrap_or_else(|error| panic!("{error}")).into_iter().map(|(_, spans)| spans).collect();
    let of_round = |round: usize| {
        let of_rank = spans.iter().map(|spans| spans[round]);
        let (start, end) = of_rank.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).expect("there are ranks");
        end - start
    };
    (0..rounds).map(of_round).min().expect("there are rounds").as_secs_f64() / repeats as f64
}

fn buffer(bytes: usize, world: &World) -> Vec<f32> {
    vec![world.rank() as f32 + 1.0; bytes / 4]
}

fn copy_fresh(bytes: usize, world: &World) -> Step {
    let from = buffer(bytes, world);
    Box::new(move || drop(black_box(black_box(&from).clone())))
}

/// The sum of `runs` of as many arrays as there are ranks.
fn sum(arrays: &[Array], runs: &Runs) -> Array {
    match arrays {
        [Array::F32(first), rest @ ..] => {
            let mut rest: Vec<_> = rest.iter().map(|array| array.singles()).collect();
            let last = rest.pop().expect("there are two ranks");
            Array::F32(runs.sum(|run, strip, out| {
                if rest.is_empty() {
                    return out.extend(first[run.clone()].iter().zip(&last[run]).map(|(a, b)| a + b));
                }
                strip.copy_from_slice(&first[run.clone()]);
                for array in &rest {
                    strip.iter_mut().zip(&array[run.clone()]).for_each(|(sum, a)| *sum += a);
                }
                out.extend(strip.iter().zip(&last[run]).map(|(sum, a)| sum + a));
            }))
        }
        [Array::Bf16(first), rest @ ..] => {
            let mut rest: Vec<_> = rest.iter().map(|array| array.halves()).collect();
            let last = rest.pop().expect("there are two ranks");
            Array::Bf16(runs.sum(|run, strip, out| {
                if rest.is_empty() {
                    let pairs = first[run.clone()].iter().zip(&last[run]);
                    return out.extend(pairs.map(|(a, b)| rounded(widened(*a) + widened(*b))));
                }
                strip.iter_mut().zip(&first[run.clone()]).for_each(|(sum, a)| *sum = widened(*a));
                for array in &rest {
                    strip.iter_mut().zip(&array[run.clone()]).for_each(|(sum, a)| *sum += widened(*a));
                }
                out.extend(strip.iter().zip(&last[run]).map(|(sum, a)| rounded(sum + widened(*a))));
            }))
        }
        [] => unreachable!("there are ranks"),
    }
}

/// Runs of adjacent elements, at equal distances.
struct Runs {
    count: usize,
    len: usize,
    start: usize,
    stride: usize,
}

impl Runs {
    /// What `add` makes of all of them: of pieces of a few elements, so that sums in f32 stay in the cache.
    fn sum<T>(&self, add: impl Fn(Range<usize>, &mut [f32], &mut Vec<T>)) -> Vec<T> {
        let mut out = Vec::with_capacity(self.count * self.len);
        let mut strip = [0.0; 1024];
        for run in 0..self.count {
            let run = self.start + run * self.stride;
            for start in (run..run + self.len).step_by(strip.len()) {
                let range = start..(start + strip.len()).min(run + self.len);
                let strip = &mut strip[..range.len()];
                add(range, strip, &mut out);
            }
        }
        out
    }
}

/// Elements of one dtype; bf16 by its bits.
enum Array {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

impl Array {
    fn ones(bytes: usize, dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16(vec![0x3f80; bytes / 2]),
            _ => Self::F32(vec![1.0; bytes / 4]),
        }
    }

    fn singles(&self) -> &[f32] {
        match self {
            Self::F32(array) => array,
            Self::Bf16(_) => unreachable!("all are of one dtype"),
        }
    }

    fn halves(&self) -> &[u16] {
        match self {
            Self::Bf16(array) => array,
            Self::F32(_) => unreachable!("all are of one dtype"),
        }
    }
}

fn widened(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// To nearest, ties to even; there is no NaN.
fn rounded(single: f32) -> u16 {
    let bits = single.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Adds arrays of `bytes`.
fn add_fresh(bytes: usize, dtype: DType, world: &World) -> Step {
    let len = bytes / dtype.size();
    add_runs(bytes, Runs { count: 1, len, start: 0, stride: len }, dtype, world)
}

/// Adds this rank's part of matrices of `bytes`, cut along `dim`.
fn add_part(bytes: usize, dim: usize, dtype: DType, world: &World) -> Step {
    let [rows, columns] = matrix(bytes, dtype);
    if dim == 0 {
        return add_fresh(bytes / world.size(), dtype, world);
    }
    let part = Cut::Chunks(columns).range(world.size(), world.rank());
    add_runs(bytes, Runs { count: rows, len: part.len(), start: part.start, stride: columns }, dtype, world)
}

fn add_runs(bytes: usize, runs: Runs, dtype: DType, world: &World) -> Step {
    let arrays: Vec<_> = (0..world.size()).map(|_| Array::ones(bytes, dtype)).collect();
    Box::new(move || drop(black_box(sum(black_box(&arrays), &runs))))
}

/// Two ranks add all; of more, each adds its share and copies the rest.
fn reduce_fresh(bytes: usize, dtype: DType, world: &World) -> Step {
    if world.size() == 2 {
        return add_fresh(bytes, dtype, world);
    }
    let (mut add, mut copy) = (add_fresh(bytes / world.size(), dtype, world), copy_fresh(bytes, world));
    Box::new(move || {
        add();
        copy();
    })
}

fn barrier(world: &World) -> Step {
    let comm = world.all();
    Box::new(move || comm.barrier("barrier".into()).wait().expect("all ranks meet"))
}

/// An all-reduce of `bytes` on every rank.
fn all_reduce(bytes: usize, dtype: DType, world: &World) -> Step {
    let tensor = Tensor::<1>::full([bytes / dtype.size()], 1.0, (world.device(), dtype)).into_dispatch();
    let comm = world.all();
    Box::new(move || {
        let work = comm.all_reduce("reduce".into(), vec![tensor.clone()], ReduceOp::Sum);
        drop(black_box(work.wait().expect("all ranks reduce")));
    })
}

/// A matrix of `bytes`.
fn matrix(bytes: usize, dtype: DType) -> [usize; 2] {
    let columns = COLUMNS.min(bytes / dtype.size() / 8);
    [bytes / dtype.size() / columns, columns]
}

/// This rank's part of it, cut along `dim`.
fn part(bytes: usize, dim: usize, dtype: DType, world: &World) -> Sharded {
    let mut shape = matrix(bytes, dtype);
    let cut = Cut::Chunks(shape[dim]);
    shape[dim] = cut.range(world.size(), world.rank()).len();
    Sharded { tensor: Tensor::<2>::full(shape, 1.0, (world.device(), dtype)).into_dispatch(), dim, cut }
}

/// An all-gather of a matrix of `bytes`.
fn gather(bytes: usize, dim: usize, dtype: DType, world: &World) -> Step {
    let (shard, comm) = (part(bytes, dim, dtype, world), world.all());
    Box::new(move || {
        let work = comm.all_gather("gather".into(), vec![shard.clone()]);
        drop(black_box(work.wait().expect("all ranks gather")));
    })
}

/// A matrix of `bytes`, cut along `dim`, is cut along the other dimension.
fn all_to_all(bytes: usize, dim: usize, dtype: DType, world: &World) -> Step {
    let (shard, comm) = (part(bytes, dim, dtype, world), world.all());
    let cut = Cut::Chunks(matrix(bytes, dtype)[1 - dim]);
    Box::new(move || {
        let work = comm.all_to_all("cut anew".into(), shard.clone(), 1 - dim, cut.clone());
        drop(black_box(work.wait().expect("all ranks exchange")));
    })
}

/// As many rows for every rank.
fn rows_to_all(bytes: usize, dtype: DType, world: &World) -> Step {
    let [rows, columns] = matrix(bytes / world.size(), dtype);
    let (rows, comm) = (rows / world.size(), world.all());
    let tensor = Tensor::<2>::full([rows * world.size(), columns], 1.0, (world.device(), dtype)).into_dispatch();
    let splits = vec![rows; world.size()];
    Box::new(move || {
        let work = comm.all_to_all_single("rows".into(), tensor.clone(), &splits, &splits);
        drop(black_box(work.wait().expect("all ranks exchange")));
    })
}

/// A reduce-scatter of a matrix of `bytes`.
fn scatter(bytes: usize, dim: usize, dtype: DType, world: &World) -> Step {
    let shape = matrix(bytes, dtype);
    let tensor = Tensor::<2>::full(shape, 1.0, (world.device(), dtype)).into_dispatch();
    let (whole, comm) = (Sharded { tensor, dim, cut: Cut::Chunks(shape[dim]) }, world.all());
    Box::new(move || {
        let work = comm.reduce_scatter("scatter".into(), vec![whole.clone()], ReduceOp::Sum);
        drop(black_box(work.wait().expect("all ranks reduce")));
    })
}
