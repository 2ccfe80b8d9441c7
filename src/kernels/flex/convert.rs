//! Copies that convert elements.

use std::marker::PhantomData;

use super::float::{Float, Wide};
use super::rows::StridedRows;
use crate::kernels::StridedCopy;

/// Number of elements that are converted at a time, chosen to fit in the first-level cache.
const STRIP: usize = 512;

/// Conversion `cast(element * scale)` or `cast(previous + element * scale)`, in the precision `W`.
pub(super) struct Cast<S, T, W> {
    scale: W,
    /// True if elements are added to those of the target.
    pub add: bool,
    types: PhantomData<fn(S) -> T>,
}

/// Buffers in which a strip is converted. Each task has its own.
pub(super) struct Scratch<S, T, W> {
    from: Box<[S]>,
    to: Box<[T]>,
    wide: Box<[W]>,
    there: Box<[W]>,
}

impl<S: Float<W>, T: Float<W>, W: Wide> Cast<S, T, W> {
    pub fn new(scale: f32, add: bool) -> Self {
        Self { scale: W::of(scale), add, types: PhantomData }
    }

    pub fn scratch(&self) -> Scratch<S, T, W> {
        fn zeros<E: bytemuck::Pod>() -> Box<[E]> {
            vec![E::zeroed(); STRIP].into()
        }
        Scratch { from: zeros(), to: zeros(), wide: zeros(), there: zeros() }
    }

    /// Converts the elements of `segments`. `ends` returns the start of the source and of the target of a segment.
    ///
    /// # Safety
    /// Each segment is inside its source, whose elements are initialized, and inside its target. While this runs,
    /// nothing else reads or writes its elements in the target. If `self` adds, those elements are initialized.
    pub unsafe fn segments(
        &self,
        scratch: &mut Scratch<S, T, W>,
        segments: &[StridedCopy],
        ends: impl Fn(&StridedCopy) -> (*const S, *mut T),
    ) {
        /// Like `each`, but compiled for AVX2. Its registers are twice as long as those that every
        /// x86-64 processor has.
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        unsafe fn by_avx2<S: Float<W>, T: Float<W>, W: Wide>(
            cast: &Cast<S, T, W>,
            scratch: &mut Scratch<S, T, W>,
            segments: &[StridedCopy],
            ends: impl Fn(&StridedCopy) -> (*const S, *mut T),
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { cast.each(scratch, segments, ends) }
        }
        // SAFETY: guaranteed by the caller; the processor supports the instructions.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") {
                return by_avx2(self, scratch, segments, ends);
            }
            self.each(scratch, segments, ends);
        }
    }

    /// Converts segment by segment.
    ///
    /// # Safety
    /// Like [`segments`](Self::segments).
    #[inline(always)]
    unsafe fn each(
        &self,
        scratch: &mut Scratch<S, T, W>,
        segments: &[StridedCopy],
        ends: impl Fn(&StridedCopy) -> (*const S, *mut T),
    ) {
        for segment in segments {
            let (from, to) = ends(segment);
            // SAFETY: guaranteed by the caller.
            unsafe { self.segment(scratch, *segment, from, to) }
        }
    }

    /// Converts the elements of a segment, whose source and target begin at `from` and `to`.
    ///
    /// Short runs are first collected in strips, and distributed to the target afterwards.
    ///
    /// # Safety
    /// Like [`segments`](Self::segments).
    #[inline(always)]
    unsafe fn segment(&self, scratch: &mut Scratch<S, T, W>, segment: StridedCopy, from: *const S, to: *mut T) {
        let (columns, rows) = (segment.run.min(STRIP), (STRIP / segment.run).max(1));
        for row in (0..segment.rows).step_by(rows) {
            for column in (0..segment.run).step_by(columns) {
                let strip = StridedCopy {
                    rows: rows.min(segment.rows - row),
                    run: columns.min(segment.run - column),
                    from: segment.from + row * segment.from_stride + column,
                    to: segment.to + row * segment.to_stride + column,
                    ..segment
                };
                // SAFETY: the strip is inside the segment.
                unsafe { self.strip(scratch, strip, from.add(strip.from), to.add(strip.to)) }
            }
        }
    }

    /// Converts a segment of at most [`STRIP`] elements at `from` and `to`.
    ///
    /// # Safety
    /// Like [`segments`](Self::segments).
    #[inline(always)]
    unsafe fn strip(&self, scratch: &mut Scratch<S, T, W>, strip: StridedCopy, from: *const S, to: *mut T) {
        let len = strip.len();
        let StridedCopy { run, from_stride, to_stride, .. } = strip;
        let together =
            |from_stride, to_stride, size| StridedRows::of(&StridedCopy { from_stride, to_stride, ..strip }, size);
        let elements = match strip.rows {
            // SAFETY: one run of initialized elements.
            1 => unsafe { std::slice::from_raw_parts(from, run) },
            _ => {
                // SAFETY: the scratch has capacity for a strip, and does not overlap the source.
                let rows = together(from_stride, run, size_of::<S>());
                unsafe { rows.copy((from.cast(), scratch.from.as_mut_ptr().cast())) };
                &scratch.from[..len]
            }
        };
        let wide = &mut scratch.wide[..len];
        S::widen(elements, wide);
        wide.iter_mut().for_each(|element| *element = element.times(self.scale));
        if self.add {
            // SAFETY: as above, for the target, which is initialized if `self` adds.
            let rows = together(to_stride, run, size_of::<T>());
            unsafe { rows.copy((to.cast_const().cast(), scratch.to.as_mut_ptr().cast())) };
            let there = &mut scratch.there[..len];
            T::widen(&scratch.to[..len], there);
            wide.iter_mut().zip(there).for_each(|(element, there)| *element = there.plus(*element));
        }
        T::round(wide, &mut scratch.to[..len]);
        // SAFETY: only this call accesses the strip's elements in the target.
        let rows = together(run, to_stride, size_of::<T>());
        unsafe { rows.copy((scratch.to.as_ptr().cast(), to.cast())) };
    }
}
