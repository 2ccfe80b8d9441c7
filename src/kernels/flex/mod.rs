//! Execution of a [`CopyPlan`] on Flex tensors: copies runs of memory on the threads of the rank's
//! pool.
//!
//! | file | contents |
//! |---|---|
//! | `sources`, `memory` | memory that is read, and memory that is written |
//! | `share` | divides segments into tasks of equal length for the threads |
//! | `tasks` | the same for the threads of several ranks that share one copy |
//! | `rows` | runs at equal distances: a specialized loop for each short length, and `memcpy` for the others |
//!
//! Each element of a target is written once: by a segment, or with zero in a gap. Several threads
//! may write to one target at the same time, each the elements of its own segments. The invariants
//! of [`CopyPlan`] make this safe.

mod memory;
mod rows;
mod share;
mod sources;
mod tasks;
#[cfg(test)]
mod tests;

use burn::backend::flex::FlexTensor;

use super::{CopyPlan, StridedCopy};
use rows::StridedRows;

pub(crate) use memory::{OutputBuffers, OutputPtrs};
pub(crate) use sources::Sources;
pub(crate) use tasks::CopyTasks;

/// Executes `copies` and returns the targets, each in separate memory.
///
/// # Panics
/// If there are no sources, or they do not match `copies`.
pub(crate) fn run(copies: &CopyPlan, sources: &Sources) -> Vec<FlexTensor> {
    let dtype = sources.dtype().expect("a copy has sources");
    let size = dtype.size();
    check(copies, sources, size);
    let mut targets = OutputBuffers::of(None, copies, size);
    let to = targets.ptrs();
    // SAFETY: a segment is inside its source, which has as many elements as the plan states. It is
    // inside its target, where no other segment writes its elements (invariants 1 and 2 of
    // `CopyPlan`). The target is new memory. Every element is in a gap, which is set to zero, or in
    // a segment, and all segments are copied.
    unsafe {
        segments(&copies.segments, sources, &to, size);
        targets.finish(&copies.targets, dtype).collect()
    }
}

/// Checks the number of sources, and the number of elements of each.
///
/// # Panics
/// If the number of sources differs from `copies`, or that of a source's elements of `size` bytes.
fn check(copies: &CopyPlan, sources: &Sources, size: usize) {
    assert_eq!(sources.len(), copies.sources.len(), "one tensor per source");
    for (bytes, shape) in sources.bytes().iter().zip(&copies.sources) {
        assert_eq!(
            bytes.len(),
            shape.num_elements() * size,
            "a source of shape {shape:?}"
        );
    }
}

/// Copies `segments` of elements of `size` bytes on the rank's threads.
///
/// # Safety
/// All segments are inside their sources, and inside the memory that begins at `to`. Nothing else
/// reads or writes that memory.
unsafe fn segments(segments: &[StridedCopy], sources: &Sources, to: &OutputPtrs, size: usize) {
    // SAFETY: guaranteed by the caller.
    share::each(segments, size, |segments| unsafe {
        copy_segments(segments, sources, to, size)
    });
}

/// Like [`segments`], on the calling thread.
///
/// # Safety
/// Same requirements as [`segments`].
unsafe fn copy_segments(segments: &[StridedCopy], sources: &Sources, to: &OutputPtrs, size: usize) {
    let from = sources.bytes();
    for segment in segments {
        let source = from[segment.source].as_ptr();
        let target = to.start(segment.target);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let start = (
                source.add(segment.from * size),
                target.add(segment.to * size),
            );
            StridedRows::of(segment, size).copy(start);
        }
    }
}
