//! [`PowerSum`]: a sum of powers that neither overflows nor underflows.

use burn::tensor::DType;

/// A sum of powers of magnitudes, held in several accumulators, one for each range of operands. The
/// middle accumulator holds ordinary operands unscaled, so that their sum keeps its bits. Each
/// other accumulator scales its operands by a power of two, which is exact. Two sums are added
/// accumulator by accumulator, on one rank or in an all-reduce. The ranges are fixed, so ranks need
/// not agree on a scale first. After J. L. Blue, "A Portable Fortran Program to Find the Euclidean
/// Norm of a Vector" (1978), which has three ranges of squares.
///
/// ```text
///   accumulator          -1               0               1
///   holds          [2^-300, 2^-100) [2^-100, 2^100) [2^100, 2^300)
///   scaled by           2^200             1            2^-200
/// ```
///
/// A maximum is held in the same way, with a single operand.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct PowerSum {
    /// Indices of the nonempty accumulators, in ascending order, with their contents.
    bins: Vec<(i32, f64)>,
}

/// Half the width of a range, in powers of two. Accumulators stay far from the limits of single
/// precision, so that many operands fit into one.
const HALF: f64 = 100.0;

/// The largest index of an accumulator.
const MOST: f64 = 1000.0;

impl PowerSum {
    /// Creates the sum of one operand.
    pub fn new(sum: f64) -> Self {
        Self::scaled(sum, 0.0)
    }

    /// Creates the sum of one operand, `sum * 2^exponent`.
    pub fn scaled(sum: f64, exponent: f64) -> Self {
        let mut all = Self::default();
        all.put(sum, exponent);
        all
    }

    /// Returns true if the sum of this many powers, computed without scaling, is as precise as its
    /// type allows. Then it is finite, and so large that the powers lost to underflow are below its
    /// last bit.
    pub fn is_precise(sum: f64, elements: usize) -> bool {
        sum.is_finite() && sum >= elements as f64 * (-HALF).exp2()
    }

    /// Returns the number of accumulators for sums of `p`-th powers of numbers of this type. The
    /// number is odd, for example 3 for squares in single precision.
    pub fn bins(p: f64, dtype: DType) -> usize {
        let smallest = if dtype == DType::F64 { 1074.0 } else { 149.0 };
        let side = ((p.abs() * smallest - HALF) / (2.0 * HALF))
            .ceil()
            .clamp(0.0, MOST);
        2 * side as usize + 1
    }

    /// Returns the contents of `count` accumulators, for an all-reduce. Operands beyond the
    /// outermost ranges go to the outermost accumulators.
    pub fn to_bins(&self, count: usize) -> Vec<f64> {
        let side = (count / 2) as i32;
        let mut numbers = vec![0.0; count];
        for &(bin, number) in &self.bins {
            let within = bin.clamp(-side, side);
            numbers[(within + side) as usize] += number * exp2(bin - within);
        }
        numbers
    }

    /// Creates the sum from the accumulators that an all-reduce has returned.
    pub fn from_bins(numbers: &[f64]) -> Self {
        let side = (numbers.len() / 2) as i32;
        let mut all = Self::default();
        (-side..)
            .zip(numbers)
            .for_each(|(bin, &number)| all.put(number, f64::from(bin) * 2.0 * HALF));
        all
    }

    /// Adds another sum.
    pub fn add(&mut self, other: &Self) {
        other
            .bins
            .iter()
            .for_each(|&(bin, number)| self.put(number, f64::from(bin) * 2.0 * HALF));
    }

    /// Replaces this value by the larger of the two, or by NaN if either is NaN.
    pub fn max(&mut self, other: &Self) {
        let a = self.value();
        let b = other.value();
        // `f64::max` would drop a NaN.
        *self = Self::new(if a.is_nan() || a > b { a } else { b });
    }

    /// Returns the sum; infinite if it exceeds the range of double precision.
    pub fn value(&self) -> f64 {
        let (top, sum) = self.top();
        if top == 0 { sum } else { sum * exp2(top) }
    }

    /// Returns the `p`-th root of the sum.
    pub fn root(&self, p: f64) -> f64 {
        let (top, sum) = self.top();
        let root = sum.powf(1.0 / p);
        if top == 0 {
            root
        } else {
            root * (f64::from(top) * 2.0 * HALF / p).exp2()
        }
    }

    /// Returns the index of the highest accumulator in use, and the sum in its scale.
    fn top(&self) -> (i32, f64) {
        if let Some((_, odd)) = self.bins.iter().find(|(_, number)| !number.is_finite()) {
            let nan = self.bins.iter().any(|(_, number)| number.is_nan());
            return (0, if nan { f64::NAN } else { *odd });
        }
        let top = self.bins.last().map_or(0, |(bin, _)| *bin);
        (
            top,
            self.bins
                .iter()
                .rev()
                .fold(0.0, |sum, (bin, number)| sum + number * exp2(bin - top)),
        )
    }

    /// Adds `sum * 2^exponent` to the accumulator of its range.
    fn put(&mut self, sum: f64, exponent: f64) {
        if sum == 0.0 {
            return;
        }
        let range = ((sum.log2() + exponent + HALF) / (2.0 * HALF)).floor();
        // The middle accumulator holds infinities and NaNs.
        let bin = if sum.is_finite() {
            range.clamp(-MOST, MOST)
        } else {
            0.0
        };
        let number = if sum.is_finite() {
            sum * (exponent - bin * 2.0 * HALF).exp2()
        } else {
            sum
        };
        let bin = bin as i32;
        match self.bins.binary_search_by_key(&bin, |(bin, _)| *bin) {
            Ok(at) => self.bins[at].1 += number,
            Err(at) => self.bins.insert(at, (bin, number)),
        }
    }
}

/// Returns the factor between the scales of two accumulators whose indices differ by `bins`.
fn exp2(bins: i32) -> f64 {
    (f64::from(bins) * 2.0 * HALF).exp2()
}
