//! Execution of a [`CopyPlan`] on Flex tensors: copies runs of memory on the threads of the rank's pool.
//!
//! | file | contents |
//! |---|---|
//! | `sources`, `memory` | memory that is read, and memory that is written |
//! | `share` | divides segments into tasks of equal length for the threads |
//! | `tasks` | the same for the threads of several ranks that share one copy |
//! | `group`, `tiles` | copies equal segments a few rows at a time, and transposes tiles of single elements |
//! | `rows` | runs at equal distances: a specialized loop per length, and `memcpy` for very long ones |
//! | `stream`, `prefetch` | stores of large copies that bypass the caches, and prefetching into the caches |
//! | `convert` | casts, scales and adds strips of elements |
//! | `float`, `round` | precisions and rounding |
//!
//! Each element of a target is written once: by a segment, or with zero in a gap. Several threads may write to one
//! target at the same time, each the elements of its own segments. The invariants of [`CopyPlan`] make this safe.

mod convert;
mod float;
mod group;
mod memory;
mod prefetch;
mod round;
mod rows;
mod share;
mod sources;
pub(crate) mod stream;
mod tasks;
#[cfg(test)]
mod tests;
mod tiles;

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
use bytemuck::Pod;
use half::{bf16, f16};

use super::{Convert, CopyPlan, StridedCopy};
use convert::Cast;
use float::{Float, Wide};

pub(crate) use memory::{Ends, OutputBuffers};
pub(crate) use prefetch::{LINE, prefetch};
pub(crate) use round::{round_to_bf16, widen_bf16};
pub(crate) use sources::{PinnedSources, Sources};
pub(crate) use tasks::CopyTasks;

/// Executes `copies` and returns the targets, each in separate memory.
///
/// Integers and booleans keep their dtype.
///
/// # Panics
/// If the sources do not match `copies`.
pub(crate) fn run(copies: &CopyPlan, sources: &Sources, convert: Convert) -> Vec<FlexTensor> {
    let dtype = dtype_of(copies, sources, convert.dtype);
    if !dtype.is_float() || (dtype == convert.dtype && convert.scale == 1.0) {
        return plain(copies, sources, dtype);
    }
    by_dtype(copies, sources, dtype, convert, None)
}

/// Executes `copies` and adds the result to the targets `onto`: `cast(previous + element * scale)`, rounded once.
///
/// Supports floats only. `onto` has the shapes of the targets and the dtype of `convert`. It is written in place if
/// no other handle to its memory exists.
///
/// # Panics
/// If the sources or `onto` do not match `copies`.
#[cfg_attr(not(feature = "testing"), allow(dead_code, reason = "the benchmark measures it"))]
pub(crate) fn add(copies: &CopyPlan, sources: &Sources, convert: Convert, onto: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let dtype = dtype_of(copies, sources, convert.dtype);
    by_dtype(copies, sources, dtype, convert, Some(onto))
}

/// Returns the dtype of the sources, or `fallback` if there are none.
fn dtype_of(copies: &CopyPlan, sources: &Sources, fallback: DType) -> DType {
    assert_eq!(sources.len(), copies.sources.len(), "one tensor per source");
    sources.dtype().unwrap_or(fallback)
}

/// Returns the elements of the sources, after checking their number.
fn read<'a, E: Pod>(copies: &CopyPlan, sources: &Sources<'a>) -> Vec<&'a [E]> {
    check(copies, sources, size_of::<E>());
    sources.elements().collect()
}

/// Checks the number of sources, and the number of elements of each.
///
/// # Panics
/// If the number of sources differs from `copies`, or that of a source's elements of `size` bytes.
fn check(copies: &CopyPlan, sources: &Sources, size: usize) {
    assert_eq!(sources.len(), copies.sources.len(), "one tensor per source");
    for (bytes, shape) in sources.bytes().iter().zip(&copies.sources) {
        assert_eq!(bytes.len(), shape.num_elements() * size, "a source of shape {shape:?}");
    }
}

/// Copies elements without conversion, by their size.
fn plain(copies: &CopyPlan, sources: &Sources, dtype: DType) -> Vec<FlexTensor> {
    let size = dtype.size();
    check(copies, sources, size);
    let mut targets = OutputBuffers::of(None, copies, size);
    let to = targets.ends();
    // SAFETY: a segment is inside its source, which has as many elements as the plan states. It is inside its
    // target, where no other segment writes its elements (invariants 1 and 2 of `CopyPlan`). The target is new
    // memory. Every element is in a gap, which is set to zero, or in a segment, and all segments are copied.
    unsafe {
        segments(&copies.segments, sources, &to, size, stream::pays(copies.copied() * size));
        targets.finish(&copies.targets, dtype).collect()
    }
}

/// Copies `segments` of elements of `size` bytes on the rank's threads. If `streams`, long runs bypass the caches.
///
/// # Safety
/// All segments are inside their sources, and inside the memory that begins at `to`. Nothing else reads or writes
/// that memory.
unsafe fn segments(segments: &[StridedCopy], sources: &Sources, to: &Ends<u8>, size: usize, streams: bool) {
    share::each(
        segments,
        size,
        || (),
        |(), segments| {
            // SAFETY: guaranteed by the caller.
            unsafe { copy_segments(segments, sources, to, size, streams) }
        },
    );
}

/// Like [`segments`], on the calling thread.
///
/// # Safety
/// Same requirements as [`segments`].
unsafe fn copy_segments(segments: &[StridedCopy], sources: &Sources, to: &Ends<u8>, size: usize, streams: bool) {
    let from = sources.bytes();
    // SAFETY: guaranteed by the caller.
    unsafe {
        group::copy(segments, size, streams, |segment| {
            let (source, target) = (from[segment.source].as_ptr(), to.start(segment.target));
            (source.add(segment.from * size), target.add(segment.to * size))
        })
    }
}

fn by_dtype(
    copies: &CopyPlan,
    sources: &Sources,
    from: DType,
    convert: Convert,
    onto: Option<Vec<FlexTensor>>,
) -> Vec<FlexTensor> {
    macro_rules! cast {
        ($($source:pat => $s:ty, $target:pat => $t:ty, $wide:ty;)*) => {
            match (from, convert.dtype) {
                $(($source, $target) => cast::<$s, $t, $wide>,)*
                (from, to) => panic!("a copy casts floats, not {from:?} to {to:?}"),
            }
        };
    }
    use DType::{BF16, F16, F32, F64, Flex32};
    let cast = cast! {
        F32 | Flex32 => f32, F32 | Flex32 => f32, f32;
        F32 | Flex32 => f32, F16 => f16, f32;
        F32 | Flex32 => f32, BF16 => bf16, f32;
        F32 | Flex32 => f32, F64 => f64, f64;
        F16 => f16, F32 | Flex32 => f32, f32;
        F16 => f16, F16 => f16, f32;
        F16 => f16, BF16 => bf16, f32;
        F16 => f16, F64 => f64, f64;
        BF16 => bf16, F32 | Flex32 => f32, f32;
        BF16 => bf16, F16 => f16, f32;
        BF16 => bf16, BF16 => bf16, f32;
        BF16 => bf16, F64 => f64, f64;
        F64 => f64, F32 | Flex32 => f32, f64;
        F64 => f64, F16 => f16, f64;
        F64 => f64, BF16 => bf16, f64;
        F64 => f64, F64 => f64, f64;
    };
    cast(copies, sources, convert, onto)
}

/// Copies and converts elements. Arithmetic is in `W`.
fn cast<S: Float<W>, T: Float<W>, W: Wide>(
    copies: &CopyPlan,
    sources: &Sources,
    convert: Convert,
    onto: Option<Vec<FlexTensor>>,
) -> Vec<FlexTensor> {
    let from = read::<S>(copies, sources);
    let run = |cast: Cast<S, T, W>, to: Ends<T>| {
        let size = size_of::<S>().max(size_of::<T>());
        share::each(
            &copies.segments,
            size,
            || cast.scratch(),
            |scratch, segments| {
                let ends = |segment: &StridedCopy| (from[segment.source].as_ptr(), to.start(segment.target));
                // SAFETY: as in `plain`; if the cast adds, the target is initialized.
                unsafe { cast.segments(scratch, segments, ends) }
            },
        );
    };
    match onto {
        None => {
            let mut targets = OutputBuffers::of(None, copies, size_of::<T>());
            run(Cast::new(convert.scale, false), targets.ends());
            // SAFETY: every element is in a gap, which is set to zero, or in a segment, and all segments are
            // copied.
            unsafe { targets.finish(&copies.targets, convert.dtype).collect() }
        }
        Some(mut onto) => {
            run(Cast::new(convert.scale, true), Ends::of(copies, &mut onto, convert.dtype));
            onto
        }
    }
}
