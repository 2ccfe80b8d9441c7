//! [`Ranges`]: a rectangular block of a tensor.

use std::ops::Range;

use smallvec::SmallVec;

/// Range of a block in each dimension of a tensor.
pub(crate) type Ranges = SmallVec<[Range<usize>; 4]>;

/// Returns the ranges of all of `shape`.
pub(crate) fn full(shape: &[usize]) -> Ranges {
    shape.iter().map(|len| 0..*len).collect()
}

/// Returns the ranges of `shape`, restricted to `range` in dimension `dim`.
pub(crate) fn slice(shape: &[usize], dim: usize, range: Range<usize>) -> Ranges {
    let mut ranges = full(shape);
    ranges[dim] = range;
    ranges
}
