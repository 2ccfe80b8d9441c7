//! [`CopyPlan::concat`]: concatenates blocks of several tensors.

use std::ops::Range;

use burn::tensor::Shape;
use smallvec::{SmallVec, smallvec};

use super::copies::{CopyPlan, StridedCopy};

/// One dimension, or several that are traversed as one: its length, and its strides in source and
/// target.
#[derive(Debug, Clone, Copy)]
struct Level {
    len: usize,
    from: usize,
    to: usize,
}

impl CopyPlan {
    /// Returns a plan that concatenates the blocks `ranges` of tensors of the given shapes along
    /// `dim`, as the only target.
    ///
    /// ```text
    /// blocks       a a a       b b            dim 1:  a a a b b
    ///              a a a       b b                    a a a b b
    /// ```
    ///
    /// The blocks have the same shape except along `dim`, and at least one block is given.
    pub fn concat(blocks: &[(Shape, &[Range<usize>])], dim: usize) -> Self {
        let mut target: SmallVec<[usize; 4]> = blocks[0].1.iter().map(Range::len).collect();
        target[dim] = blocks.iter().map(|(_, ranges)| ranges[dim].len()).sum();
        let mut segments = Vec::with_capacity(blocks.len());
        let mut start = 0;
        for (source, (shape, ranges)) in blocks.iter().enumerate() {
            if ranges.iter().all(|range| !range.is_empty()) {
                block(source, shape, ranges, &target, (dim, start), &mut segments);
            }
            start += ranges[dim].len();
        }
        Self::new(
            blocks.iter().map(|(shape, _)| shape.clone()).collect(),
            vec![Shape::from(&target[..])],
            segments,
        )
    }
}

/// Appends the segments of one block, which starts at index `start` of `dim` in the target.
fn block(
    source: usize,
    shape: &[usize],
    ranges: &[Range<usize>],
    target: &[usize],
    (dim, start): (usize, usize),
    segments: &mut Vec<StridedCopy>,
) {
    let mut from = 0;
    let mut to = 0;
    let mut levels: SmallVec<[Level; 4]> = smallvec![Level {
        len: 1,
        from: 1,
        to: 1
    }];
    let mut strides = Level {
        len: 0,
        from: 1,
        to: 1,
    };
    for at in (0..shape.len()).rev() {
        let Level {
            from: from_stride,
            to: to_stride,
            ..
        } = strides;
        from += ranges[at].start * from_stride;
        to += if at == dim { start * to_stride } else { 0 };
        let inner = levels.last_mut().expect("the list starts with one level");
        let len = ranges[at].len();
        if inner.len * inner.from == from_stride && inner.len * inner.to == to_stride {
            inner.len *= len;
        } else if len > 1 {
            levels.push(Level {
                len,
                from: from_stride,
                to: to_stride,
            });
        }
        strides = Level {
            len: 0,
            from: from_stride * shape[at],
            to: to_stride * target[at],
        };
    }
    let run = levels[0].len;
    // The longest remaining level becomes the rows. Every index of the other levels is a separate
    // segment.
    let rows = (1..levels.len()).max_by_key(|level| levels[*level].len);
    let rows = rows.map_or(
        Level {
            len: 1,
            from: run,
            to: run,
        },
        |level| levels.remove(level),
    );
    let mut rest = levels;
    rest.remove(0);
    let count: usize = rest.iter().map(|level| level.len).product();
    segments.extend((0..count).map(|index| {
        let mut index = index;
        let mut from = from;
        let mut to = to;
        for level in &rest {
            let at = index % level.len;
            (index, from, to) = (
                index / level.len,
                from + at * level.from,
                to + at * level.to,
            );
        }
        StridedCopy {
            source,
            target: 0,
            from,
            to,
            rows: rows.len,
            run,
            from_stride: rows.from,
            to_stride: rows.to,
        }
    }));
}
