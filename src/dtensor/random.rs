//! Random values that do not depend on the mesh.
//!
//! Element `i` (row-major, in the global tensor) is a function of `(seed, i)` only. So every layout
//! on every mesh draws the same tensor, and each rank computes only its own region.
//!
//! ```text
//! element    0   1   2   3 | 4   5   6   7 | ..
//! counter        0         |       1       | ..     four words a counter
//! uniform    w0  w1  w2  w3                         one word per element
//! normal     cos sin cos sin                        Box-Muller on (w0, w1) and (w2, w3)
//! ```

use std::ops::Range;

use burn::tensor::Distribution;
use rayon::prelude::*;

use super::philox::philox4x32;

/// Number of elements that one task fills.
const GRAIN: usize = 4096;

/// Returns the region `slices` of a random tensor of `shape`, row-major. Element `i` of the tensor
/// is `sample(words, i % 4)`, with the four random words of counter `i / 4`.
pub(super) fn fill<T: Clone + Default + Send>(
    seed: u64,
    shape: &[usize],
    slices: &[Range<usize>],
    sample: impl Fn([u32; 4], usize) -> T + Sync,
) -> Vec<T> {
    let key = [seed as u32, (seed >> 32) as u32];
    let words = |counter: u64| philox4x32([counter as u32, (counter >> 32) as u32, 0, 0], key);
    let runs = ContiguousRuns { shape, slices };
    let mut values = vec![T::default(); runs.len()];
    values
        .par_chunks_mut(GRAIN)
        .enumerate()
        .for_each(|(task, part)| {
            let mut done = 0;
            while done < part.len() {
                let (start, run) = runs.at(task * GRAIN + done);
                let run = run.min(part.len() - done);
                let mut current = words(start / 4);
                for (index, value) in (start..).zip(&mut part[done..done + run]) {
                    if index % 4 == 0 {
                        current = words(index / 4);
                    }
                    *value = sample(current, (index % 4) as usize);
                }
                done += run;
            }
        });
    values
}

/// Returns one element of `distribution`, computed from the random words of its counter.
///
/// Uniform values have 24 random bits: they are multiples of 2^-24 of the interval, exact in f32.
pub(super) fn float(distribution: Distribution, words: [u32; 4], lane: usize) -> f32 {
    match distribution {
        Distribution::Default => unit(words[lane]) as f32,
        Distribution::Uniform(low, high) => {
            let value = (low + unit(words[lane]) * (high - low)) as f32;
            let low = low as f32;
            let high = high as f32;
            // Rounding to f32 can produce the excluded upper end.
            if value < high {
                value
            } else {
                high.next_down().max(low)
            }
        }
        Distribution::Bernoulli(p) => f32::from(unit(words[lane]) < p),
        Distribution::Normal(mean, std) => {
            let pair = lane & !1;
            let radius = (-2.0 * open_unit(words[pair]).ln()).sqrt();
            let angle = std::f64::consts::TAU * unit(words[pair + 1]);
            let normal = if lane == pair {
                angle.cos()
            } else {
                angle.sin()
            };
            (mean + std * radius * normal) as f32
        }
    }
}

/// Returns one integer of `range`. The probabilities are uniform up to a relative error of
/// `range.len() / 2^32`.
pub(super) fn int(range: &Range<i64>, words: [u32; 4], lane: usize) -> i64 {
    let span = range.end.abs_diff(range.start);
    let offset = (u128::from(words[lane]) * u128::from(span)) >> 32;
    range.start.wrapping_add_unsigned(offset as u64)
}

/// Contiguous runs of elements of a rectangular region of a row-major tensor.
struct ContiguousRuns<'a> {
    shape: &'a [usize],
    slices: &'a [Range<usize>],
}

impl ContiguousRuns<'_> {
    /// Returns the number of elements in the region.
    fn len(&self) -> usize {
        self.slices.iter().map(Range::len).product()
    }

    /// Returns the global index of the region's element `local`, and the length of the contiguous
    /// run that begins there.
    fn at(&self, mut local: usize) -> (u64, usize) {
        let mut global = 0;
        let mut stride = 1;
        let mut run = 1;
        for (dim, (slice, &len)) in self.slices.iter().zip(self.shape).enumerate().rev() {
            let index = local % slice.len();
            local /= slice.len();
            global += (slice.start + index) as u64 * stride;
            stride *= len as u64;
            if dim + 1 == self.shape.len() {
                run = slice.len() - index;
            }
        }
        (global, run)
    }
}

/// Maps a random word to a uniform value in `[0, 1)`.
fn unit(word: u32) -> f64 {
    f64::from(word >> 8) / f64::from(1 << 24)
}

/// Maps a random word to a uniform value in `(0, 1]` with all 32 bits, as argument of the
/// logarithm.
fn open_unit(word: u32) -> f64 {
    (f64::from(word) + 1.0) / 4_294_967_296.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(distribution: Distribution, seed: u64, shape: &[usize]) -> Vec<f32> {
        let slices: Vec<_> = shape.iter().map(|&len| 0..len).collect();
        part(distribution, seed, shape, &slices)
    }

    fn part(
        distribution: Distribution,
        seed: u64,
        shape: &[usize],
        slices: &[Range<usize>],
    ) -> Vec<f32> {
        fill(seed, shape, slices, |words, lane| {
            float(distribution, words, lane)
        })
    }

    #[test]
    fn a_shard_equals_the_same_shard_of_the_full_tensor() {
        let shape = [5, 7, 6];
        for distribution in [Distribution::Default, Distribution::Normal(1.0, 2.0)] {
            let all = full(distribution, 3, &shape);
            for slices in [
                [0..5, 0..7, 0..6],
                [1..4, 2..7, 3..5],
                [4..5, 0..0, 1..6],
                [2..3, 6..7, 5..6],
            ] {
                let part = part(distribution, 3, &shape, &slices);
                let mut expected = Vec::new();
                for a in slices[0].clone() {
                    for b in slices[1].clone() {
                        for c in slices[2].clone() {
                            expected.push(all[(a * 7 + b) * 6 + c]);
                        }
                    }
                }
                assert_eq!(part, expected, "{slices:?}");
            }
        }
    }

    #[test]
    fn a_shard_longer_than_one_task_equals_the_full_tensor() {
        let all = full(Distribution::Default, 9, &[3 * GRAIN]);
        let own = 17..2 * GRAIN + 30;
        let part = part(
            Distribution::Default,
            9,
            &[3 * GRAIN],
            std::slice::from_ref(&own),
        );
        assert_eq!(part, all[own]);
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let n = 200_000;
        let moments = |distribution| {
            let values = full(distribution, 11, &[n]);
            let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n as f64;
            let var = values
                .iter()
                .map(|&v| (f64::from(v) - mean).powi(2))
                .sum::<f64>()
                / n as f64;
            (mean, var)
        };
        for (distribution, mean, var) in [
            (Distribution::Default, 0.5, 1.0 / 12.0),
            (Distribution::Uniform(-2.0, 4.0), 1.0, 3.0),
            (Distribution::Normal(3.0, 0.5), 3.0, 0.25),
            (Distribution::Bernoulli(0.3), 0.3, 0.21),
        ] {
            let (m, v) = moments(distribution);
            // Four standard errors of each estimate.
            assert!(
                (m - mean).abs() < 4.0 * (var / n as f64).sqrt(),
                "{distribution:?} {m}"
            );
            assert!(
                (v - var).abs() < 4.0 * var * (2.0 / n as f64).sqrt(),
                "{distribution:?} {v}"
            );
        }
    }

    #[test]
    fn uniform_excludes_its_upper_end_after_rounding() {
        let one_ulp = f64::from(1.0f32.next_up());
        let values = full(Distribution::Uniform(1.0, one_ulp), 1, &[1000]);
        assert!(values.iter().all(|&value| value == 1.0));
    }

    #[test]
    fn seeds_and_neighbours_differ() {
        let a = full(Distribution::Default, 1, &[64]);
        let b = full(Distribution::Default, 2, &[64]);
        assert!(a.iter().zip(&b).all(|(a, b)| a != b));
        assert!(a.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn integers_fill_their_range() {
        let values = fill(
            5,
            &[4000],
            std::slice::from_ref(&(0..4000)),
            |words, lane| int(&(-3..4), words, lane),
        );
        let mut counts = [0usize; 7];
        values
            .iter()
            .for_each(|value| counts[(value + 3) as usize] += 1);
        // Four standard errors around 4000 / 7.
        assert!(
            counts.iter().all(|count| count.abs_diff(571) < 90),
            "{counts:?}"
        );
    }
}
