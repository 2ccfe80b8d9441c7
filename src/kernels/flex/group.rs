//! Segments that are copied together.
//!
//! Where a tensor is cut along its last dimension, runs are short and lie side by side in the whole. Copied one
//! segment after another, the whole would be walked in leaps once for every rank. So segments alike that follow
//! each other are copied row by row:
//!
//! ```text
//! rank 0   0 1 2 3        0 1 a b p q        first the first run of every rank,
//! rank 1   a b c d        2 3 c d r s        then the second ..
//! rank 2   p q r s
//! ```
//!
//! Where runs are of one element, that is a matrix transposed, and done in square tiles.

use smallvec::SmallVec;

use super::rows::{Rows, Start};
use super::{stream, tiles};
use crate::kernels::Segment;

/// At most so many together: each is a stream of its own to the processor.
const TOGETHER: usize = 16;

/// Longer runs, in bytes, gain nothing.
const SHORT: usize = 1024;

/// Copies `segments` of elements of `size` bytes; `start` says where each begins. If it `streams`, long
/// runs go past the caches.
///
/// # Safety
/// All runs of all segments lie in memory that may be read and written, and none overlaps another that is written.
pub(super) unsafe fn copy(segments: &[Segment], size: usize, streams: bool, start: impl Fn(&Segment) -> Start) {
    let mut rest = segments;
    while let [first, ..] = rest {
        let rows = Rows::of(first, size);
        let is_long = if streams { stream::is_long(rows.run) } else { rows.run > SHORT };
        let count = if rows.rows == 1 || is_long {
            1
        } else {
            let alike = |segment: &&Segment| Rows::of(segment, size) == rows;
            rest.iter().take(TOGETHER).take_while(alike).count()
        };
        let (group, behind) = rest.split_at(count);
        rest = behind;
        if count == 1 {
            // SAFETY: the caller's.
            unsafe {
                match streams {
                    true => rows.stream(start(first)),
                    false => rows.copy(&[start(first)]),
                }
            }
            continue;
        }
        for segment in behind.iter().take(count) {
            rows.prefetch(start(segment));
        }
        let starts: SmallVec<[Start; TOGETHER]> = group.iter().map(&start).collect();
        // SAFETY: the caller's.
        unsafe { tiles::copy(rows, &starts) };
    }
    if streams {
        stream::done();
    }
}
