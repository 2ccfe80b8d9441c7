//! [`CopyTasks`]: a plain copy that several ranks make together.

use super::memory::Ends;
use super::share::{SplitPoint, TASK_BYTES, for_range, split_points};
use super::{CopyPlan, Sources, StridedCopy, check, segments, stream};

/// A copy of elements of one size, cut into pieces of nearly equal length, each of which a rank copies with its threads.
#[derive(Debug)]
pub(crate) struct CopyTasks {
    places: Vec<SplitPoint>,
    size: usize,
    streams: bool,
}

impl CopyTasks {
    /// At most `most` of `copies`, of elements of `size` bytes: fewer where they would be too short for a rank's threads.
    ///
    /// # Panics
    /// If the sources are not those of `copies`, or nothing is copied.
    pub fn new(copies: &CopyPlan, sources: &Sources, size: usize, most: usize) -> Self {
        check(copies, sources, size);
        let total = copies.segments.iter().map(StridedCopy::len).sum();
        assert!(total > 0, "a copy without elements has no pieces");
        let count = total * size / (TASK_BYTES * rayon::current_num_threads());
        let places = split_points(&copies.segments, total, count.min(most).max(1));
        Self { places, size, streams: stream::pays(total * size) }
    }

    pub fn count(&self) -> usize {
        self.places.len() - 1
    }

    /// Copies one of them.
    ///
    /// # Safety
    /// `copies` and `sources` are what it was made of, `to` is where targets of `copies` begin, and nobody reads them, or
    /// copies this piece, meanwhile.
    pub unsafe fn copy(&self, index: usize, copies: &CopyPlan, sources: &Sources, to: &Ends<u8>) {
        for_range(&copies.segments, self.places[index], self.places[index + 1], |part| {
            // SAFETY: a segment lies inside its source, which was checked, and inside its target, where it is the only one
            // to write (invariants 1 and 2 of `CopyPlan`); so do parts of it, and no two pieces have a part in common.
            unsafe { segments(part, sources, to, self.size, self.streams) }
        });
    }
}
