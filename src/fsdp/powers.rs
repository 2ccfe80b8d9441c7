//! [`PowerSum`]: a sum of powers that neither overflows nor underflows.

use burn::tensor::DType;

/// A sum of powers of magnitudes, held in accumulators: one for each range of values that a term may have. The middle
/// accumulator holds ordinary terms unscaled, so that their sum keeps its bits; each other one scales its terms by a power
/// of two, which is exact. Two sums are added accumulator by accumulator, on one rank or in an all-reduce. The ranges are
/// fixed, so ranks need not agree on a scale first. After J. L. Blue, "A Portable Fortran Program to Find the Euclidean Norm
/// of a Vector" (1978), which has three ranges of squares.
///
/// ```text
///   accumulator          -1               0               1
///   holds          [2^-300, 2^-100) [2^-100, 2^100) [2^100, 2^300)
///   scaled by           2^200             1            2^-200
/// ```
///
/// A maximum is held in the same way; it has one term.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct PowerSum {
    /// Numbers of the accumulators that hold something, in ascending order, and what they hold.
    bins: Vec<(i32, f64)>,
}

/// Half the width of a range, in powers of two. An accumulator stays far from the limits of single precision, so that many
/// terms fit into one.
const HALF: f64 = 100.0;

/// The largest number of an accumulator.
const MOST: f64 = 1000.0;

impl PowerSum {
    /// Creates the sum of one term.
    pub fn new(sum: f64) -> Self {
        Self::scaled(sum, 0.0)
    }

    /// Creates the sum of one term, `sum * 2^exponent`.
    pub fn scaled(sum: f64, exponent: f64) -> Self {
        let mut all = Self::default();
        all.put(sum, exponent);
        all
    }

    /// Returns whether the sum of this many powers, computed without scaling, is as precise as its type: it is finite, and
    /// so large that what each power may have lost to underflow is below its last bit.
    pub fn is_precise(sum: f64, elements: usize) -> bool {
        sum.is_finite() && sum >= elements as f64 * (-HALF).exp2()
    }

    /// Returns how many accumulators hold sums of `p`-th powers of numbers of this type: an odd number, such as 3 of
    /// squares in single precision.
    pub fn bins(p: f64, dtype: DType) -> usize {
        let smallest = if dtype == DType::F64 { 1074.0 } else { 149.0 };
        let side = ((p.abs() * smallest - HALF) / (2.0 * HALF)).ceil().clamp(0.0, MOST);
        2 * side as usize + 1
    }

    /// Returns what this many accumulators hold, for an all-reduce. Terms beyond the outermost go to these.
    pub fn to_bins(&self, count: usize) -> Vec<f64> {
        let side = (count / 2) as i32;
        let mut numbers = vec![0.0; count];
        for &(bin, number) in &self.bins {
            let within = bin.clamp(-side, side);
            numbers[(within + side) as usize] += number * exp2(bin - within);
        }
        numbers
    }

    /// Creates the sum that an all-reduce of accumulators has returned.
    pub fn from_bins(numbers: &[f64]) -> Self {
        let side = (numbers.len() / 2) as i32;
        let mut all = Self::default();
        (-side..).zip(numbers).for_each(|(bin, &number)| all.put(number, f64::from(bin) * 2.0 * HALF));
        all
    }

    /// Adds another.
    pub fn add(&mut self, other: &Self) {
        other.bins.iter().for_each(|&(bin, number)| self.put(number, f64::from(bin) * 2.0 * HALF));
    }

    /// Makes it the larger of the two, or NaN if one is.
    pub fn max(&mut self, other: &Self) {
        let (a, b) = (self.value(), other.value());
        // `f64::max` would drop a NaN.
        *self = Self::new(if a.is_nan() || a > b { a } else { b });
    }

    /// Returns the sum, infinite if a number in double precision cannot hold it.
    pub fn value(&self) -> f64 {
        let (top, sum) = self.top();
        if top == 0 { sum } else { sum * exp2(top) }
    }

    /// Returns the `p`-th root of the sum.
    pub fn root(&self, p: f64) -> f64 {
        let (top, sum) = self.top();
        let root = sum.powf(1.0 / p);
        if top == 0 { root } else { root * (f64::from(top) * 2.0 * HALF / p).exp2() }
    }

    /// Returns the number of the highest accumulator in use, and the sum in its scale.
    fn top(&self) -> (i32, f64) {
        if let Some((_, odd)) = self.bins.iter().find(|(_, number)| !number.is_finite()) {
            let nan = self.bins.iter().any(|(_, number)| number.is_nan());
            return (0, if nan { f64::NAN } else { *odd });
        }
        let top = self.bins.last().map_or(0, |(bin, _)| *bin);
        (top, self.bins.iter().rev().fold(0.0, |sum, (bin, number)| sum + number * exp2(bin - top)))
    }

    /// Adds `sum * 2^exponent` to the accumulator of its range.
    fn put(&mut self, sum: f64, exponent: f64) {
        if sum == 0.0 {
            return;
        }
        let range = ((sum.log2() + exponent + HALF) / (2.0 * HALF)).floor();
        // The middle one holds what is infinite or NaN.
        let bin = if sum.is_finite() { range.clamp(-MOST, MOST) } else { 0.0 };
        let number = if sum.is_finite() { sum * (exponent - bin * 2.0 * HALF).exp2() } else { sum };
        let bin = bin as i32;
        match self.bins.binary_search_by_key(&bin, |(bin, _)| *bin) {
            Ok(at) => self.bins[at].1 += number,
            Err(at) => self.bins.insert(at, (bin, number)),
        }
    }
}

/// Returns the factor between the scales of two accumulators that are this far apart.
fn exp2(bins: i32) -> f64 {
    (f64::from(bins) * 2.0 * HALF).exp2()
}
