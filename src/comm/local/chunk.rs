//! Chunk arithmetic.

use std::ops::Range;

/// The `index`-th of `parts` chunks of `0..len`: ceil-sized, the tail ones possibly empty.
pub(super) fn chunk(len: usize, parts: usize, index: usize) -> Range<usize> {
    let size = len.div_ceil(parts);
    (index * size).min(len)..((index + 1) * size).min(len)
}
