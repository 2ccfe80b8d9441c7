//! What the collectives are beside: threads that copy or add.

use std::hint::black_box;

use burn::tensor::DType;
use burn_dtensor::comm::World;

use crate::steps::Step;

fn buffer(bytes: usize, world: &World) -> Vec<f32> {
    vec![world.rank() as f32 + 1.0; bytes / 4]
}

pub fn copy_fresh(bytes: usize, world: &World) -> Step {
    let from = buffer(bytes, world);
    Box::new(move || drop(black_box(black_box(&from).clone())))
}

/// The sum of as many arrays as there are ranks.
fn sum(arrays: &[Array]) -> Array {
    match arrays {
        [Array::F32(first), rest @ ..] => {
            let mut rest = rest.iter().map(|array| match array {
                Array::F32(array) => array,
                Array::Bf16(_) => unreachable!("all are of one dtype"),
            });
            let second = rest.next().expect("there are two ranks");
            let mut sum: Vec<f32> = first.iter().zip(second).map(|(a, b)| a + b).collect();
            rest.for_each(|array| sum.iter_mut().zip(array).for_each(|(sum, a)| *sum += a));
            Array::F32(sum)
        }
        [Array::Bf16(first), rest @ ..] => {
            let mut rest: Vec<_> = rest.iter().map(|array| array.halves()).collect();
            let last = rest.pop().expect("there are two ranks");
            if rest.is_empty() {
                return Array::Bf16(first.iter().zip(last).map(|(a, b)| rounded(widened(*a) + widened(*b))).collect());
            }
            // In strips, so that the sums in f32 stay in the cache.
            let mut out = Vec::with_capacity(first.len());
            let mut strip = [0.0; 1024];
            for start in (0..first.len()).step_by(strip.len()) {
                let range = start..(start + strip.len()).min(first.len());
                let strip = &mut strip[..range.len()];
                strip.iter_mut().zip(&first[range.clone()]).for_each(|(sum, a)| *sum = widened(*a));
                for array in &rest {
                    strip.iter_mut().zip(&array[range.clone()]).for_each(|(sum, a)| *sum += widened(*a));
                }
                out.extend(strip.iter().zip(&last[range]).map(|(sum, a)| rounded(sum + widened(*a))));
            }
            Array::Bf16(out)
        }
        [] => unreachable!("there are ranks"),
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

pub fn add_fresh(bytes: usize, dtype: DType, world: &World) -> Step {
    let arrays: Vec<_> = (0..world.size()).map(|_| Array::ones(bytes, dtype)).collect();
    Box::new(move || drop(black_box(sum(black_box(&arrays)))))
}

/// Two ranks add all; of more, each adds its share and copies the rest.
pub fn reduce_fresh(bytes: usize, dtype: DType, world: &World) -> Step {
    if world.size() == 2 {
        return add_fresh(bytes, dtype, world);
    }
    let (mut add, mut copy) = (add_fresh(bytes / world.size(), dtype, world), copy_fresh(bytes, world));
    Box::new(move || {
        add();
        copy();
    })
}
