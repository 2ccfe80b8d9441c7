//! [`RunBlock`]: a rectangular block of a row-major tensor, as runs of adjacent elements.

use std::ops::Range;

use smallvec::SmallVec;

/// Returns the row-major strides of `shape`.
fn strides(shape: &[usize]) -> SmallVec<[usize; 4]> {
    let mut strides = SmallVec::from_elem(1, shape.len());
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

/// A block, as runs that are visited in row-major order:
///
/// ```text
/// for offset in block.offsets()
///     elements[offset ..][.. block.run]
/// ```
#[derive(Debug)]
pub(super) struct RunBlock {
    offsets: Offsets,
    /// Length of each run of adjacent elements.
    pub run: usize,
}

impl RunBlock {
    /// Creates the block `ranges` of a row-major tensor of `shape`.
    pub fn new(shape: &[usize], ranges: &[Range<usize>]) -> Self {
        let strides = strides(shape);
        let is_full = |dim: usize| ranges[dim] == (0..shape[dim]);
        // The last dimension of which the block does not have all indices. From there on, elements
        // are adjacent.
        let split = (0..shape.len())
            .rev()
            .find(|dim| !is_full(*dim))
            .unwrap_or(0);
        let run = ranges[split..].iter().map(Range::len).product();
        let start = ranges
            .get(split)
            .map_or(0, |range| range.start * strides[split]);
        Self {
            offsets: Offsets::new(&ranges[..split], &strides[..split], start),
            run,
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.offsets.left * self.run
    }

    /// Returns the offsets at which the runs start.
    pub fn offsets(&self) -> Offsets {
        self.offsets.clone()
    }
}

/// Iterator over the offsets of all indices of some dimensions, in row-major order.
#[derive(Debug, Clone)]
pub(super) struct Offsets {
    /// Length, stride and index of each dimension.
    dims: SmallVec<[(usize, usize, usize); 4]>,
    next: usize,
    left: usize,
}

impl Offsets {
    fn new(ranges: &[Range<usize>], strides: &[usize], start: usize) -> Self {
        let starts = ranges
            .iter()
            .zip(strides)
            .map(|(range, stride)| range.start * stride)
            .sum::<usize>();
        let dims = ranges
            .iter()
            .zip(strides)
            .map(|(range, stride)| (range.len(), *stride, 0))
            .collect();
        Self {
            dims,
            next: start + starts,
            left: ranges.iter().map(Range::len).product(),
        }
    }
}

impl Iterator for Offsets {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let offset = self.next;
        for (len, stride, index) in self.dims.iter_mut().rev() {
            *index += 1;
            self.next += *stride;
            if *index < *len {
                break;
            }
            self.next -= *stride * *len;
            *index = 0;
        }
        Some(offset)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Offsets {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::backend::ranges::full;

    /// Returns the elements of a block of `0..` by index arithmetic alone.
    fn expected(shape: &[usize], ranges: &[Range<usize>]) -> Vec<usize> {
        let strides = strides(shape);
        let all = 0..shape.iter().product::<usize>();
        all.filter(|i| (0..shape.len()).all(|d| ranges[d].contains(&(i / strides[d] % shape[d]))))
            .collect()
    }

    fn walked(shape: &[usize], ranges: &[Range<usize>]) -> Vec<usize> {
        let block = RunBlock::new(shape, ranges);
        block
            .offsets()
            .flat_map(|offset| offset..offset + block.run)
            .collect()
    }

    #[test]
    fn walks_every_block_in_row_major_order() {
        let shape = [2, 3, 4];
        let shardings = |len: usize| (0..=len).flat_map(move |a| (a..=len).map(move |b| a..b));
        for a in shardings(2) {
            for b in shardings(3) {
                for c in shardings(4) {
                    let ranges = [a.clone(), b.clone(), c];
                    assert_eq!(
                        walked(&shape, &ranges),
                        expected(&shape, &ranges),
                        "{ranges:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_full_block_is_one_run() {
        let block = RunBlock::new(&[4, 5, 6], &full(&[4, 5, 6]));
        assert_eq!((block.offsets().len(), block.run), (1, 120));
    }
}
