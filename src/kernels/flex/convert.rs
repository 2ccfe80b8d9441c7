//! Copies whose elements change on their way.

use std::marker::PhantomData;

use super::float::{Float, Wide};
use super::rows::StridedRows;
use crate::kernels::StridedCopy;

/// Elements converted at a time: few enough to stay in the first-level cache.
const STRIP: usize = 512;

/// `cast(element * scale)`, or `cast(there + element * scale)`, in the precision `W`.
pub(super) struct Cast<S, T, W> {
    scale: W,
    /// Whether elements are added to those of the target.
    pub add: bool,
    types: PhantomData<fn(S) -> T>,
}

/// Where a strip is converted; one for each thread at work.
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

    /// Converts the elements of `segments`; `ends` says where the source and the target of one begin.
    ///
    /// # Safety
    /// Each segment lies inside its source, of initialized elements, and inside its target, where nobody else reads
    /// or writes its elements meanwhile. They are initialized if this adds.
    pub unsafe fn segments(
        &self,
        scratch: &mut Scratch<S, T, W>,
        segments: &[StridedCopy],
        ends: impl Fn(&StridedCopy) -> (*const S, *mut T),
    ) {
        /// The same, compiled for registers twice as long as those that every x86-64 has.
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        unsafe fn by_avx2<S: Float<W>, T: Float<W>, W: Wide>(
            cast: &Cast<S, T, W>,
            scratch: &mut Scratch<S, T, W>,
            segments: &[StridedCopy],
            ends: impl Fn(&StridedCopy) -> (*const S, *mut T),
        ) {
            // SAFETY: the caller's.
            unsafe { cast.each(scratch, segments, ends) }
        }
        // SAFETY: the caller's; the processor has what it is asked for.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") {
                return by_avx2(self, scratch, segments, ends);
            }
            self.each(scratch, segments, ends);
        }
    }

    /// # Safety
    /// As of [`segments`](Self::segments).
    #[inline(always)]
    unsafe fn each(
        &self,
        scratch: &mut Scratch<S, T, W>,
        segments: &[StridedCopy],
        ends: impl Fn(&StridedCopy) -> (*const S, *mut T),
    ) {
        for segment in segments {
            let (from, to) = ends(segment);
            // SAFETY: the caller's.
            unsafe { self.segment(scratch, *segment, from, to) }
        }
    }

    /// Converts the elements of a segment, whose source and target begin at `from` and `to`.
    ///
    /// Short runs are brought together in strips first, and taken apart afterwards.
    ///
    /// # Safety
    /// As of [`segments`](Self::segments).
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
                // SAFETY: a part of the segment.
                unsafe { self.strip(scratch, strip, from.add(strip.from), to.add(strip.to)) }
            }
        }
    }

    /// # Safety
    /// The same, of a segment of at most [`STRIP`] elements at `from` and `to`.
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
                // SAFETY: the scratch has room for a strip, and is no part of the source.
                let rows = together(from_stride, run, size_of::<S>());
                unsafe { rows.copy((from.cast(), scratch.from.as_mut_ptr().cast())) };
                &scratch.from[..len]
            }
        };
        let wide = &mut scratch.wide[..len];
        S::widen(elements, wide);
        wide.iter_mut().for_each(|element| *element = element.times(self.scale));
        if self.add {
            // SAFETY: as above, of the target, which is initialized then.
            let rows = together(to_stride, run, size_of::<T>());
            unsafe { rows.copy((to.cast_const().cast(), scratch.to.as_mut_ptr().cast())) };
            let there = &mut scratch.there[..len];
            T::widen(&scratch.to[..len], there);
            wide.iter_mut().zip(there).for_each(|(element, there)| *element = there.plus(*element));
        }
        T::round(wide, &mut scratch.to[..len]);
        // SAFETY: the strip's place in the target is this call's alone.
        let rows = together(run, to_stride, size_of::<T>());
        unsafe { rows.copy((scratch.to.as_ptr().cast(), to.cast())) };
    }
}
