//! Values of inputs, and the ranks' local values. Pure functions.
//!
//! All values are functions of positions. Ranks therefore know each other's local values without
//! communication, and a failure is reproducible.

use std::ops::Range;

use crate::placement::{Layout, PartialOp, Placement};

/// Kind of the elements of an input.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ValueKind {
    /// Different floats inside the range.
    Float(Range<f64>),
    /// Different floats inside the range, with every third replaced by NaN.
    Nan(Range<f64>),
    /// Integral floats that never equal those of another such input (up to three inputs). Local
    /// values under `P(max)` or `P(min)` that are not the extremum may be equal.
    Meeting,
    /// This many different integers around 0, most of them more than once.
    Tied(usize),
    /// Integers inside the range.
    Int(Range<i64>),
    Bool,
}

impl ValueKind {
    /// Returns true if a partial placement with `op` makes sense for such elements.
    pub(super) fn takes(&self, op: PartialOp) -> bool {
        match self {
            Self::Float(_) | Self::Nan(_) | Self::Meeting => true,
            Self::Int(_) => op != PartialOp::Avg,
            Self::Tied(_) | Self::Bool => false,
        }
    }

    /// Returns `len` values of the input with index `input`.
    ///
    /// Floats are a shuffled ramp with some jitter. No two are equal, and none is near a multiple
    /// of the step, where operators have kinks.
    pub(super) fn full_values(&self, input: usize, len: usize) -> Vec<f64> {
        let value = |at: usize| match self {
            Self::Float(range) => {
                let step = (range.end - range.start) / len as f64;
                let offset = 0.3 + 0.17 * (input % 3) as f64 + 0.05 * unit([input, at, 1]);
                single(range.start + step * (shuffled(at, len) as f64 + offset))
            }
            Self::Nan(_) if at % 3 == 1 => f64::NAN,
            Self::Nan(range) => Self::Float(range.clone()).full_values(input, len)[at],
            Self::Meeting => (3 * (bits([input, at, 2]) % 3) + input as u64 % 3) as f64,
            Self::Tied(count) => {
                (bits([input, at, 2]) % *count as u64) as f64 - (*count / 2) as f64
            }
            Self::Int(range) => {
                (range.start + (bits([input, at, 2]) % range.end.abs_diff(range.start)) as i64)
                    as f64
            }
            Self::Bool => (bits([input, at, 3]) % 2) as f64,
        };
        (0..len).map(value).collect()
    }

    /// Splits `value`, the element at position `at`, for a partial placement with `op`. Returns the
    /// local value of the rank at `index` of `size` along `mesh_dim`, and the derivative of the
    /// reduced value with respect to it.
    ///
    /// The local values differ irregularly between ranks. For a minimum or maximum, a quarter of
    /// the values that are not the extremum is infinitely far away, like the value of a rank
    /// without elements. The others stay in the range, where operators have slopes.
    fn part(
        &self,
        op: PartialOp,
        value: f64,
        at: usize,
        mesh_dim: usize,
        index: usize,
        size: usize,
    ) -> (f64, f64) {
        let holds = bits([at, mesh_dim, 4]) % size as u64 == index as u64;
        if let Self::Nan(range) = self {
            // The other ranks hold a value that would be the extremum if there were no NaN.
            let share = 0.4 * unit([at, mesh_dim, 60 + index]) * (range.end - range.start);
            return match op {
                PartialOp::Max if value.is_nan() && !holds => (range.end - share, 0.0),
                PartialOp::Min if value.is_nan() && !holds => (range.start + share, 0.0),
                _ => Self::Float(range.clone()).part(op, value, at, mesh_dim, index, size),
            };
        }
        let noise = |index: usize| match self {
            Self::Float(_) => unit([at, mesh_dim, 5 + index]) - 0.4,
            _ => (bits([at, mesh_dim, 5 + index]) % 7) as f64 - 3.0,
        };
        let share = unit([at, mesh_dim, 50 + index]);
        let far = matches!(self, Self::Float(_)) && (share > 0.75 || value.is_infinite());
        let last = index + 1 == size;
        // The last rank holds the difference between `value` and the sum of the other ranks'
        // values.
        let rest = || {
            (0..index)
                .map(|index| single(value + noise(index)))
                .sum::<f64>()
        };
        match op {
            PartialOp::Sum if last => (value - rest(), 1.0),
            PartialOp::Sum => (value + noise(index), 1.0),
            PartialOp::Avg if last => (value * size as f64 - rest(), 1.0 / size as f64),
            PartialOp::Avg => (value + noise(index), 1.0 / size as f64),
            PartialOp::Min | PartialOp::Max if holds => (value, 1.0),
            PartialOp::Min if far => (f64::INFINITY, 0.0),
            PartialOp::Max if far => (f64::NEG_INFINITY, 0.0),
            PartialOp::Max => match self {
                Self::Float(range) => (value - (0.1 + 0.8 * share) * (value - range.start), 0.0),
                Self::Meeting => (value - 1.0 - (4.0 * share).floor(), 0.0),
                Self::Int(range) => (
                    value - (share * (value - range.start as f64 + 1.0)).floor(),
                    0.0,
                ),
                Self::Nan(_) | Self::Tied(_) | Self::Bool => (value, 0.0),
            },
            PartialOp::Min => match self {
                Self::Float(range) => (value + (0.1 + 0.8 * share) * (range.end - value), 0.0),
                Self::Meeting => (value + 1.0 + (4.0 * share).floor(), 0.0),
                Self::Int(range) => (value + (share * (range.end as f64 - value)).floor(), 0.0),
                Self::Nan(_) | Self::Tied(_) | Self::Bool => (value, 0.0),
            },
            PartialOp::Product => {
                let factor = |other: usize| match self {
                    Self::Float(_) => single(0.5 + unit([at, mesh_dim, 100 + other])),
                    _ => 1.0,
                };
                let others: f64 = (0..size - 1)
                    .filter(|&other| other != index)
                    .map(factor)
                    .product();
                let rest = value / (0..size - 1).map(factor).product::<f64>();
                if last {
                    (rest, others)
                } else {
                    (factor(index), others * rest)
                }
            }
        }
    }

    /// Returns the local values of the rank at `coordinate` for the full tensor `complete`, and the
    /// gradient of the loss with respect to them. `gradient` is the gradient with respect to the
    /// full tensor.
    pub(super) fn held(
        &self,
        complete: &[f64],
        gradient: Option<&[f64]>,
        shape: &[usize],
        layout: &Layout,
        coordinate: &[usize],
    ) -> LocalValues {
        let mut held = LocalValues {
            values: Vec::new(),
            gradient: Vec::new(),
        };
        for at in positions(shape, &layout.local_slices(shape, coordinate)) {
            let mut value = complete[at];
            let mut derivative = gradient.map_or(0.0, |gradient| gradient[at]);
            for (mesh_dim, placement) in layout.placements().iter().enumerate() {
                if let Placement::Partial(op) = *placement {
                    let size = layout.mesh_shape()[mesh_dim];
                    let (part, factor) =
                        self.part(op, value, at, mesh_dim, coordinate[mesh_dim], size);
                    (value, derivative) = (single(part), derivative * factor);
                }
            }
            held.values.push(value);
            held.gradient.push(derivative);
        }
        held
    }
}

/// Local values of a rank for an input, in row-major order, and the expected gradient.
#[derive(Debug)]
pub(super) struct LocalValues {
    pub(super) values: Vec<f64>,
    pub(super) gradient: Vec<f64>,
}

/// Returns the weight of element `at` of output `output` in the loss.
pub(super) fn weight(output: usize, at: usize) -> f64 {
    single(0.5 + unit([output, at, 99]))
}

/// Returns the row-major positions, in a tensor of this shape, of the elements inside `ranges`.
fn positions(shape: &[usize], ranges: &[Range<usize>]) -> Vec<usize> {
    ranges
        .iter()
        .zip(shape)
        .fold(vec![0], |outer, (range, len)| {
            outer
                .iter()
                .flat_map(|&outer| range.clone().map(move |at| outer * len + at))
                .collect()
        })
}

/// Permutes the indices `0..len` in an order unrelated to rows and columns.
fn shuffled(at: usize, len: usize) -> usize {
    let coprime = (len * 5 / 8..)
        .find(|step| gcd(*step, len) == 1)
        .unwrap_or(1);
    (at * coprime + len / 3) % len
}

/// Rounds to single precision, in which the tensors are stored.
fn single(value: f64) -> f64 {
    f64::from(value as f32)
}

/// Returns a pseudorandom number in `0.0..1.0`.
fn unit(position: [usize; 3]) -> f64 {
    (bits(position) >> 40) as f64 / (1u64 << 24) as f64
}

/// Returns pseudorandom bits: the finalizer of SplitMix64, applied to the numbers in sequence.
fn bits(position: [usize; 3]) -> u64 {
    position.into_iter().fold(0, |state, number| {
        let mut z = (state ^ number as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

pub(super) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPS: [PartialOp; 5] = [
        PartialOp::Sum,
        PartialOp::Avg,
        PartialOp::Min,
        PartialOp::Max,
        PartialOp::Product,
    ];

    #[test]
    fn floats_have_no_ties_and_stay_in_range() {
        for (input, len) in [(0, 1), (1, 6), (2, 24), (3, 125)] {
            let mut values = ValueKind::Float(-2.0..3.0).full_values(input, len);
            assert!(values.iter().all(|value| (-2.0..3.0).contains(value)));
            values.sort_by(f64::total_cmp);
            assert!(values.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }

    /// Computes the expected values by brute force over all ranks, in both orders of the mesh
    /// dimensions.
    #[test]
    fn partial_values_reduce_to_the_full_one_and_differ() {
        let shape = [3, 2];
        let mesh = [2, 3];
        let reduce = |op, parts: &[f64]| match op {
            PartialOp::Sum => parts.iter().sum(),
            PartialOp::Avg => parts.iter().sum::<f64>() / parts.len() as f64,
            PartialOp::Min => parts.iter().copied().fold(f64::INFINITY, f64::min),
            PartialOp::Product => parts.iter().product(),
            PartialOp::Max => parts.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        };
        for values in [
            ValueKind::Float(-1.0..2.0),
            ValueKind::Int(0..5),
            ValueKind::Int(-4..3),
        ] {
            let complete = values.full_values(0, 6);
            for (a, b) in OPS.into_iter().flat_map(|a| OPS.map(|b| (a, b))) {
                let Ok(layout) =
                    Layout::new(&mesh, &[Placement::Partial(a), Placement::Partial(b)])
                else {
                    continue;
                };
                if !values.takes(a) || !values.takes(b) {
                    continue;
                }
                let held = |x, y| {
                    values
                        .held(&complete, None, &shape, &layout, &[x, y])
                        .values
                };
                for (at, expected) in complete.iter().enumerate() {
                    let value = |x, y| held(x, y)[at];
                    let inner = [0, 1].map(|x| reduce(b, &[value(x, 0), value(x, 1), value(x, 2)]));
                    let outer = [0, 1, 2].map(|y| reduce(a, &[value(0, y), value(1, y)]));
                    for full in [reduce(a, &inner), reduce(b, &outer)] {
                        assert!(
                            (full - expected).abs() < 1e-5,
                            "{layout}: {full} for {expected}"
                        );
                    }
                }
                let ranks = [(0, 0), (1, 0), (0, 2), (1, 2)];
                assert!(
                    ranks.iter().any(|&(x, y)| held(x, y) != held(0, 0)),
                    "{layout}"
                );
            }
        }
    }

    #[test]
    fn slices_are_taken_in_row_major_order() {
        assert_eq!(positions(&[2, 3], &[0..2, 1..3]), [1, 2, 4, 5]);
        assert_eq!(positions(&[2, 3], &[1..1, 0..3]), [0; 0]);
    }
}
