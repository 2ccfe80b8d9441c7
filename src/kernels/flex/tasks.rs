//! [`CopyTasks`]: a plain copy that several ranks share.

use super::memory::OutputPtrs;
use super::share::{SplitPoint, for_range, split_points};
use super::{CopyPlan, Sources, StridedCopy, check, copy_segments};
use crate::memory::HostTuning;

/// A copy of elements of one size, divided into tasks of nearly equal length, each for one thread.
#[derive(Debug)]
pub(crate) struct CopyTasks {
    places: Vec<SplitPoint>,
    size: usize,
}

impl CopyTasks {
    /// Divides `copies` of elements of `size` bytes into at most `most` tasks for each thread of
    /// the rank's pool: fewer if they would be too short for a thread.
    ///
    /// # Panics
    /// If the sources do not match `copies`, or nothing is copied.
    pub fn new(copies: &CopyPlan, sources: &Sources, size: usize, most: usize) -> Self {
        check(copies, sources, size);
        let total = copies.segments.iter().map(StridedCopy::len).sum();
        assert!(total > 0, "a copy without elements has no tasks");
        let most = most * rayon::current_num_threads();
        let places = split_points(
            &copies.segments,
            total,
            (total * size / HostTuning::get().task_bytes).clamp(1, most),
        );
        Self { places, size }
    }

    pub fn count(&self) -> usize {
        self.places.len() - 1
    }

    /// Executes one task on the calling thread.
    ///
    /// # Safety
    /// `copies` and `sources` are those with which `self` was created, and `to` is where the
    /// targets of `copies` begin. While this runs, no other thread reads the targets or executes
    /// this task.
    pub unsafe fn copy(&self, index: usize, copies: &CopyPlan, sources: &Sources, to: &OutputPtrs) {
        for_range(
            &copies.segments,
            self.places[index],
            self.places[index + 1],
            |part| {
                // SAFETY: a segment is inside its source, which was checked. It is inside its
                // target, where no other segment writes its elements (invariants 1 and 2 of
                // `CopyPlan`). The same holds for sections of segments, and tasks do not overlap.
                unsafe { copy_segments(part, sources, to, self.size) }
            },
        );
    }
}
