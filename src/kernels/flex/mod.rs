//! [`CopyPlan`] of Flex tensors: runs of memory, over the threads of the rank's pool.
//!
//! | file | what it does |
//! |---|---|
//! | `sources`, `memory` | what is read, and what is written |
//! | `share` | segments cut into pieces of equal length for the threads |
//! | `tasks` | the same for the threads of several ranks, that make one copy for all |
//! | `group`, `tiles` | segments alike in turn, a few rows of each; single elements side by side, transposed |
//! | `rows` | runs at equal distances, by a loop made for their length; very long ones by `memcpy` |
//! | `stream`, `prefetch` | long runs of large copies, past the caches; what is read next, into them |
//! | `convert` | casts, scales and adds strips of elements |
//! | `float`, `round` | precisions and rounding |
//!
//! Targets are memory that is written once: by the segments, and with zeros in the gaps between them. Threads write
//! to one target at the same time, each the elements of its own segments; see the invariants of [`CopyPlan`].

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

/// The targets of `copies`, each in memory of its own.
///
/// Integers and booleans keep their dtype.
///
/// # Panics
/// If the sources are not those of `copies`.
pub(crate) fn run(copies: &CopyPlan, sources: &Sources, convert: Convert) -> Vec<FlexTensor> {
    let dtype = dtype_of(copies, sources, convert.dtype);
    if !dtype.is_float() || (dtype == convert.dtype && convert.scale == 1.0) {
        return plain(copies, sources, dtype);
    }
    by_dtype(copies, sources, dtype, convert, None)
}

/// `onto`, where the segments of `copies` lead with what they bring added: `cast(there + element * scale)`, rounded
/// once.
///
/// Floats only; `onto` has the shapes of the targets and the dtype of `convert`, and is written in place where nobody
/// else has a handle to it.
///
/// # Panics
/// If the sources or `onto` are not those of `copies`.
#[cfg_attr(not(feature = "testing"), allow(dead_code, reason = "the benchmark measures it"))]
pub(crate) fn add(copies: &CopyPlan, sources: &Sources, convert: Convert, onto: Vec<FlexTensor>) -> Vec<FlexTensor> {
    let dtype = dtype_of(copies, sources, convert.dtype);
    by_dtype(copies, sources, dtype, convert, Some(onto))
}

/// The dtype of the sources; without any, `fallback`.
fn dtype_of(copies: &CopyPlan, sources: &Sources, fallback: DType) -> DType {
    assert_eq!(sources.len(), copies.sources.len(), "one tensor for each source");
    sources.dtype().unwrap_or(fallback)
}

/// The elements of the sources, as many as `copies` say of each.
fn read<'a, E: Pod>(copies: &CopyPlan, sources: &Sources<'a>) -> Vec<&'a [E]> {
    check(copies, sources, size_of::<E>());
    sources.elements().collect()
}

/// # Panics
/// If there are not as many sources as `copies` say, or one has not as many elements of `size` bytes.
fn check(copies: &CopyPlan, sources: &Sources, size: usize) {
    assert_eq!(sources.len(), copies.sources.len(), "one tensor for each source");
    for (bytes, shape) in sources.bytes().iter().zip(&copies.sources) {
        assert_eq!(bytes.len(), shape.num_elements() * size, "a source of shape {shape:?}");
    }
}

/// Elements moved by size alone.
fn plain(copies: &CopyPlan, sources: &Sources, dtype: DType) -> Vec<FlexTensor> {
    let size = dtype.size();
    check(copies, sources, size);
    let mut targets = OutputBuffers::of(None, copies, size);
    let to = targets.ends();
    // SAFETY: a segment lies inside its source, which has as many elements as the plan says, and inside its target, where
    // it is the only one to write (invariants 1 and 2 of `CopyPlan`); the target is new memory. Every element is in a gap,
    // which are zero, or in a segment, which are all copied.
    unsafe {
        segments(&copies.segments, sources, &to, size, stream::pays(copies.copied() * size));
        targets.finish(&copies.targets, dtype).collect()
    }
}

/// Copies `segments` of elements of `size` bytes, over the rank's threads. If they `stream`, long runs go past the caches.
///
/// # Safety
/// They lie in their sources, and in memory that begins where `to` says, where nobody else reads or writes.
unsafe fn segments(segments: &[StridedCopy], sources: &Sources, to: &Ends<u8>, size: usize, streams: bool) {
    let from = sources.bytes();
    share::each(
        segments,
        size,
        || (),
        |(), segments| {
            // SAFETY: the caller's.
            unsafe {
                group::copy(segments, size, streams, |segment| {
                    let (source, target) = (from[segment.source].as_ptr(), to.start(segment.target));
                    (source.add(segment.from * size), target.add(segment.to * size))
                })
            }
        },
    );
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

/// Elements computed with in `W`.
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
                // SAFETY: as in `plain`; what is added to is initialized.
                unsafe { cast.segments(scratch, segments, ends) }
            },
        );
    };
    match onto {
        None => {
            let mut targets = OutputBuffers::of(None, copies, size_of::<T>());
            run(Cast::new(convert.scale, false), targets.ends());
            // SAFETY: every element is in a gap, which are zero, or in a segment, which are all copied.
            unsafe { targets.finish(&copies.targets, convert.dtype).collect() }
        }
        Some(mut onto) => {
            run(Cast::new(convert.scale, true), Ends::of(copies, &mut onto, convert.dtype));
            onto
        }
    }
}
