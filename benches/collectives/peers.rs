//! What the collectives are beside: threads that copy or add.

use std::hint::black_box;
use std::ops::Range;

use burn::tensor::DType;
use burn_dtensor::comm::World;
use burn_dtensor::placement::ShardSizes;

use crate::steps::{Step, matrix};

fn buffer(bytes: usize, world: &World) -> Vec<f32> {
    vec![world.rank() as f32 + 1.0; bytes / 4]
}

pub fn copy_fresh(bytes: usize, world: &World) -> Step {
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
                    return out.extend(
                        first[run.clone()]
                            .iter()
                            .zip(&last[run])
                            .map(|(a, b)| a + b),
                    );
                }
                strip.copy_from_slice(&first[run.clone()]);
                for array in &rest {
                    strip
                        .iter_mut()
                        .zip(&array[run.clone()])
                        .for_each(|(sum, a)| *sum += a);
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
                strip
                    .iter_mut()
                    .zip(&first[run.clone()])
                    .for_each(|(sum, a)| *sum = widened(*a));
                for array in &rest {
                    strip
                        .iter_mut()
                        .zip(&array[run.clone()])
                        .for_each(|(sum, a)| *sum += widened(*a));
                }
                out.extend(
                    strip
                        .iter()
                        .zip(&last[run])
                        .map(|(sum, a)| rounded(sum + widened(*a))),
                );
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
    /// What `add` makes of all of them: of pieces of a few elements, so that sums in f32 stay in
    /// the cache.
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
pub fn add_fresh(bytes: usize, dtype: DType, world: &World) -> Step {
    let len = bytes / dtype.size();
    add_runs(
        bytes,
        Runs {
            count: 1,
            len,
            start: 0,
            stride: len,
        },
        dtype,
        world,
    )
}

/// Adds this rank's part of matrices of `bytes`, cut along `dim`.
pub fn add_part(bytes: usize, dim: usize, dtype: DType, world: &World) -> Step {
    let [rows, columns] = matrix(bytes, dtype);
    if dim == 0 {
        return add_fresh(bytes / world.size(), dtype, world);
    }
    let part = ShardSizes::Chunked(columns).range(world.size(), world.rank());
    add_runs(
        bytes,
        Runs {
            count: rows,
            len: part.len(),
            start: part.start,
            stride: columns,
        },
        dtype,
        world,
    )
}

fn add_runs(bytes: usize, runs: Runs, dtype: DType, world: &World) -> Step {
    let arrays: Vec<_> = (0..world.size())
        .map(|_| Array::ones(bytes, dtype))
        .collect();
    Box::new(move || drop(black_box(sum(black_box(&arrays), &runs))))
}

/// Two ranks add all; of more, each adds its share and copies the rest.
pub fn reduce_fresh(bytes: usize, dtype: DType, world: &World) -> Step {
    if world.size() == 2 {
        return add_fresh(bytes, dtype, world);
    }
    let (mut add, mut copy) = (
        add_fresh(bytes / world.size(), dtype, world),
        copy_fresh(bytes, world),
    );
    Box::new(move || {
        add();
        copy();
    })
}
