//! Bandwidth of the copies around a unit's collectives, next to plain copies of as many bytes in
//! the same run.
//!
//! ```text
//! cargo bench --bench copy_kernels -- --ranks 8 --dim 1 --dtype bf16
//! ```
//!
//! Three lists of parameters, drawn by a fixed seed, so that most lengths are odd: 150 of 1 to 16 K
//! elements, 54 of 64 K to 1 M, 3 of 16 to 64 M. Along dimension 0 they are rows of 257, sharded
//! unevenly; along dimension 1 they have 64 rows, sharded evenly. Figures are GB a second, read and
//! written; zeros in the padding are written.
//!
//! On Flex the plain copy is `copy_from_slice`, once for each target, into memory taken from the
//! same allocator just before, on as many threads. Where tensors are many and small, it shows that
//! they are burn's: one is found through three pointers, and made of three allocations in addition
//! to its memory. So on one thread the plain copy is there once more, from as many tensors to as
//! many. They take turns, so that whatever else the machine does affects each of them; each figure
//! is the best of its rounds.

use std::hint::black_box;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::testing::copies::{UnitCopies, UnitCopy};
use clap::{Parser, ValueEnum};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Two ones in bf16, about one in f32: subnormal numbers would measure how slowly those are
/// multiplied.
const ONES: u32 = 0x3f80_3f80;

#[derive(Parser)]
#[command(
    about = "Bandwidth of the copies around a unit's collectives, in GB read and written a second"
)]
struct Cli {
    /// Device that copies
    #[arg(long, value_enum, default_value = "flex")]
    device: Device,
    /// Ranks that share every parameter
    #[arg(long, default_value_t = 8)]
    ranks: usize,
    /// The sharded dimension, 0 or 1
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..2))]
    dim: u64,
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Dtype,
    /// Threads that copy, on Flex
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Lists with more elements are left out
    #[arg(long, default_value_t = usize::MAX)]
    max_elements: usize,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Device {
    Flex,
    #[cfg(feature = "wgpu")]
    Wgpu,
    #[cfg(feature = "cuda")]
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    Bf16,
}

/// One copy, and the dtype of its elements.
struct Case {
    name: &'static str,
    copies: UnitCopies,
    dtype: DType,
    threads: usize,
}

/// One call, done when it returns.
type Step = Box<dyn FnMut()>;

/// A copy, and a plain one of as many bytes. A device is a function that prepares them.
struct Steps {
    copy: Step,
    plain: Step,
    /// On one thread of the CPU: the plain one, from tensors of burn's to others.
    tensors: Option<Step>,
}

impl Device {
    fn steps(self, case: Case) -> Steps {
        match self {
            Self::Flex => flex(case),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => cube(
                case,
                &burn::tensor::Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
            ),
            #[cfg(feature = "cuda")]
            Self::Cuda => cube(case, &burn::tensor::Device::cuda(0)),
        }
    }
}

fn main() {
    let cli = Cli::parse();
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(cli.threads)
        .build()
        .expect("threads");
    // All of it on a thread of the pool, as a rank is.
    pool.install(|| run(&cli));
}

fn run(cli: &Cli) {
    let dtype = cli.dtype.to_possible_value().expect("no value is skipped");
    println!(
        "{} ranks, sharded along dim {}, {}, GB/s read and written:\n",
        cli.ranks,
        cli.dim,
        dtype.get_name()
    );
    println!(
        "{:<28} {:<20} {:>8} {:>8} {:>8} {:>6} {:>8} {:>6}",
        "list", "copy", "MB", "copied", "plain", "ratio", "tensors", "ratio"
    );
    let mut rng = StdRng::seed_from_u64(0);
    for (count, least, most) in [
        (150, 1 << 10, 16 << 10),
        (54, 64 << 10, 1 << 20),
        (3, 16 << 20, 64 << 20),
    ] {
        let lens: Vec<usize> = (0..count).map(|_| rng.random_range(least..=most)).collect();
        if lens.iter().sum::<usize>() > cli.max_elements {
            continue;
        }
        let shapes: Vec<Shape> = lens.iter().map(|len| cli.shape(*len)).collect();
        for case in cli.cases(shapes) {
            let (name, bytes) = (case.name, case.bytes());
            let [copy, peers @ ..] = measure(cli.device.steps(case), bytes);
            let speed = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
            let list = format!("{count} of {} K to {} K", least >> 10, most >> 10);
            print!(
                "{list:<28} {name:<20} {:>8.1} {:>8.2}",
                bytes as f64 / 1e6,
                speed(copy)
            );
            for peer in peers.into_iter().filter(|peer| *peer < Duration::MAX) {
                print!(
                    " {:>8.2} {:>6.2}",
                    speed(peer),
                    peer.as_secs_f64() / copy.as_secs_f64()
                );
            }
            println!();
        }
    }
}

impl Cli {
    /// The shape of a parameter of about `len` elements.
    fn shape(&self, len: usize) -> Shape {
        match self.dim {
            0 => Shape::new([(len / 257).max(1), 257]),
            _ => Shape::new([64, (len / 64 / self.ranks).max(1) * self.ranks]),
        }
    }

    fn cases(&self, shapes: Vec<Shape>) -> impl Iterator<Item = Case> {
        let dtype = match self.dtype {
            Dtype::F32 => DType::F32,
            Dtype::Bf16 => DType::BF16,
        };
        let all = [
            ("all-gather in", UnitCopy::GatherIn),
            ("all-gather out", UnitCopy::GatherOut),
            ("reduce-scatter in", UnitCopy::ScatterIn),
            ("reduce-scatter out", UnitCopy::ScatterOut),
        ];
        all.into_iter().map(move |(name, copy)| {
            let copies = UnitCopies::new(copy, self.ranks, shapes.clone(), self.dim as usize);
            Case {
                name,
                copies,
                dtype,
                threads: self.threads,
            }
        })
    }
}

impl Case {
    /// Elements of all targets, padding among them.
    fn made(&self) -> usize {
        self.copies.targets().iter().map(Shape::num_elements).sum()
    }

    /// Read and written.
    fn bytes(&self) -> usize {
        (self.copies.copied() + self.made()) * self.dtype.size()
    }
}

/// The best time of each: rounds of a few calls, in turn.
fn measure(
    Steps {
        copy,
        plain,
        tensors,
    }: Steps,
    bytes: usize,
) -> [Duration; 3] {
    let repeats = ((256 << 20) / bytes.max(1)).clamp(1, 1000);
    let rounds = if bytes > 256 << 20 { 7 } else { 40 };
    let time = |step: &mut Step| {
        let start = Instant::now();
        (0..repeats).for_each(|_| step());
        start.elapsed() / repeats as u32
    };
    let mut steps = [Some(copy), Some(plain), tensors];
    // What is measured finds its memory warm.
    steps.iter_mut().flatten().for_each(|step| step());
    let mut best = [Duration::MAX; 3];
    for _ in 0..rounds {
        for (best, step) in best.iter_mut().zip(&mut steps) {
            *best = step.as_mut().map_or(*best, time).min(*best);
        }
    }
    best
}

fn flex(case: Case) -> Steps {
    let (total, made) = (case.bytes() / 2, case.made());
    let Case {
        copies,
        dtype,
        threads,
        ..
    } = case;
    let tensor = |shape: &Shape| {
        let bytes = Bytes::from_elems(vec![
            ONES;
            (shape.num_elements() * dtype.size()).div_ceil(4)
        ]);
        FlexTensor::new(bytes, Layout::contiguous(shape.clone()), dtype)
    };
    let sources: Vec<FlexTensor> = copies.sources().iter().map(tensor).collect();
    // As many bytes as the copy reads and writes, half of them each way.
    let len =
        |shape: &Shape| (shape.num_elements() as u128 * total as u128 / made as u128) as usize;
    let lens: Vec<usize> = copies.targets().iter().map(len).collect();
    let block = vec![1_u8; total];
    let parts = copies.sources().len();
    let part = |part| bytes_tensor(block[ShardSizes::Chunked(total).range(parts, part)].to_vec());
    let parts: Vec<_> = (0..parts).map(part).collect();
    let part_lens = lens.clone();
    Steps {
        copy: Box::new(move || drop(black_box(copies.run_flex(black_box(&sources))))),
        plain: Box::new(move || drop(black_box(plain(black_box(&block), &lens, threads)))),
        tensors: (threads == 1).then(|| -> Step {
            Box::new(move || drop(black_box(tensors(black_box(&parts), &part_lens))))
        }),
    }
}

/// One launch each, to new memory, waited for.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn cube(case: Case, device: &burn::tensor::Device) -> Steps {
    let copies = std::rc::Rc::new(case.copies.on_cube(device, case.dtype));
    let plain = copies.clone();
    Steps {
        copy: Box::new(move || copies.copy()),
        plain: Box::new(move || plain.plain()),
        tensors: None,
    }
}

/// `block` in new vectors of `lens` bytes.
fn plain(block: &[u8], lens: &[usize], threads: usize) -> Vec<Vec<u8>> {
    let mut rest = block;
    let copy = |len: &usize| {
        let (from, behind) = rest.split_at(*len);
        rest = behind;
        let mut to = Vec::with_capacity(*len);
        let room = &mut to.spare_capacity_mut()[..*len];
        if threads == 1 {
            room.write_copy_of_slice(from);
        } else {
            let chunk = len.div_ceil(4 * threads).max(128 << 10);
            let copy = |(to, from): (&mut [MaybeUninit<u8>], &[u8])| {
                to.write_copy_of_slice(from);
            };
            room.par_chunks_mut(chunk)
                .zip(from.par_chunks(chunk))
                .for_each(copy);
        }
        // SAFETY: all of them were written.
        unsafe { to.set_len(*len) };
        to
    };
    lens.iter().map(copy).collect()
}

/// The bytes of `parts`, one after another, in new tensors of `lens` bytes.
fn tensors(parts: &[FlexTensor], lens: &[usize]) -> Vec<FlexTensor> {
    let (mut parts, mut rest) = (parts.iter(), &[][..]);
    let copy = |len: &usize| {
        let mut to = Vec::with_capacity(*len);
        while to.len() < *len {
            if rest.is_empty() {
                rest = parts
                    .next()
                    .expect("as many bytes are read as written")
                    .bytes();
            }
            let (from, behind) = rest.split_at(rest.len().min(len - to.len()));
            to.extend_from_slice(from);
            rest = behind;
        }
        bytes_tensor(to)
    };
    lens.iter().map(copy).collect()
}

fn bytes_tensor(bytes: Vec<u8>) -> FlexTensor {
    let layout = Layout::contiguous(Shape::new([bytes.len()]));
    FlexTensor::new(Bytes::from_elems(bytes), layout, DType::U8)
}
