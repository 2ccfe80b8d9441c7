//! Segments that are copied together.
//!
//! Where a tensor is cut along any but its first dimension, the runs of all ranks lie side by side in the whole. Copied
//! one segment after another, the whole would be walked in leaps once for every rank. So segments alike that follow
//! each other in it, be it the source or the target, are copied in tiles, a few rows of each in turn, which the caches hold:
//!
//! ```text
//! rank 0   0 1 2 3 ..      0 1 a b p q        first the first two runs of every rank,
//! rank 1   a b c d ..      2 3 c d r s        then the next two ..
//! rank 2   p q r s ..      ..
//! ```
//!
//! Where runs are of one element, that is a matrix transposed.

use super::rows::{RowStart, StridedRows};
use super::{stream, tiles};
use crate::kernels::StridedCopy;

/// At most so many together: each is a stream of its own to the processor.
const TOGETHER: usize = 16;

/// Bytes of a tile of short rows: few enough for the second-level cache.
const TILE: usize = 128 << 10;

/// Runs from so many bytes on of so few segments that lie side by side in the target are copied in turn: so it is written from
/// one end to the other, which for caches that hold it is a third faster, and the sources are read so anyway.
const LONG: usize = 1 << 10;
const FEW: usize = 8;

/// Rows of a tile are a multiple of this: enough to be [streamed](stream::rows) at several places, and a multiple of
/// those that are transposed at once.
const HEIGHT: usize = 32;

/// Copies `segments` of elements of `size` bytes; `start` says where each begins. If it `streams`, long
/// runs go past the caches.
///
/// # Safety
/// All runs of all segments lie in memory that may be read and written, and none overlaps another that is written.
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
            // SAFETY: the caller's, of some of the rows.
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
