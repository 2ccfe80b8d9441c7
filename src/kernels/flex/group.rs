//! Copies of several segments, interleaved.
//!
//! If a tensor is sharded along any dimension except its first, the runs of all ranks are interleaved in the full
//! tensor. Copying one segment after another would traverse the full tensor once per rank, with large strides. So
//! consecutive equal segments are copied together in tiles, a few rows of each in turn, which fit in the caches.
//! This applies if the full tensor is the source or the target:
//!
//! ```text
//! rank 0   0 1 2 3 ..      0 1 a b p q        first the first two runs of every rank,
//! rank 1   a b c d ..      2 3 c d r s        then the next two ..
//! rank 2   p q r s ..      ..
//! ```
//!
//! If runs are single elements, this transposes a matrix.

use super::rows::{RowStart, StridedRows};
use super::{stream, tiles};
use crate::kernels::StridedCopy;

/// Maximum number of segments that are copied together. Each is a separate stream of memory accesses to the
/// processor.
const TOGETHER: usize = 16;

/// Bytes of a tile of short rows, chosen to fit in the second-level cache.
const TILE: usize = 128 << 10;

/// Minimum bytes of runs that are copied one row of each segment in turn. This applies to at most [`FEW`] segments
/// that are adjacent in the target. The target is then written sequentially, which is a third faster if the caches
/// hold it. The sources are read sequentially in either case.
const LONG: usize = 1 << 10;
const FEW: usize = 8;

/// Rows of a tile are a multiple of this number. It is large enough for [streaming](stream::rows) at several
/// positions, and a multiple of the rows that are transposed at once.
const HEIGHT: usize = 32;

/// Copies `segments` of elements of `size` bytes. `start` returns the start of a segment. If `streams`, long runs
/// bypass the caches.
///
/// # Safety
/// All runs of all segments are in memory that may be read and written. No run overlaps another that is written.
pub(super) unsafe fn copy(
    segments: &[StridedCopy],
    size: usize,
    streams: bool,
    start: impl Fn(&StridedCopy) -> RowStart,
) {
    let mut rest = segments;
    while let [first, ..] = rest {
        let rows = StridedRows::of(first, size);
        let count = match rows.rows {
            1 => 1,
            _ => {
                let are_side_by_side =
                    |segment: &&StridedCopy| segment.source == first.source || rows.to_stride > rows.run;
                let are_same =
                    |segment: &&StridedCopy| StridedRows::of(segment, size) == rows && are_side_by_side(segment);
                rest.iter().take(TOGETHER).take_while(are_same).count()
            }
        };
        let (group, behind) = rest.split_at(count);
        rest = behind;
        let streams_it = streams && stream::are_long(&rows);
        let height = match count {
            1 => rows.rows,
            2..=FEW if rows.run >= LONG && rows.to_stride > rows.run && !streams_it => 1,
            _ => (TILE / (count * rows.run)).max(1).next_multiple_of(HEIGHT),
        };
        for row in (0..rows.rows).step_by(height) {
            let tile = StridedRows { rows: height.min(rows.rows - row), ..rows };
            // SAFETY: guaranteed by the caller, for a subset of the rows.
            unsafe {
                let starts = group.iter().map(|segment| rows.start(start(segment), row));
                if streams_it {
                    starts.for_each(|start| stream::rows(tile, start));
                } else {
                    tiles::copy(tile, starts);
                }
            }
        }
    }
    if streams {
        stream::done();
    }
}
