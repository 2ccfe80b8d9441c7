//! [`Ranges`]: a rectangular block of a tensor.

use std::ops::Range;

use smallvec::SmallVec;

/// Per-dimension ranges of a tensor.
pub(crate) type Ranges = SmallVec<[Range<usize>; 4]>;

/// The whole of `shape`.
pub(crate) fn full(shape: &[usize]) -> Ranges {
    shape.iter().map(|len| 0..*len).collect()
}

/// `shape` cut to `range` in `dim`.
pub(crate) fn slice(shape: &[usize], dim: usize, range: Range<usize>) -> Ranges {
    let mut ranges = full(shape);
    ranges[dim] = range;
    ranges
}
