//! [`Rows`]: runs of bytes at equal distances, of one segment or of several alike.

use super::stream;
use crate::kernels::Segment;

/// Bytes of a line of the cache.
const LINE: usize = 64;

/// Bytes asked for ahead; behind them the processor sees where this leads.
const PREFETCHED: usize = 512;

/// Some runs of bytes, each a fixed distance after the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    pub rows: usize,
    /// Bytes of each run.
    pub run: usize,
    /// From the start of a run to that of the next, in the source.
    pub from_stride: usize,
    /// The same in the target.
    pub to_stride: usize,
}

/// Where the first run is read and written.
pub(super) type Start = (*const u8, *mut u8);

impl Rows {
    /// Of `segment` with elements of `size` bytes.
    pub fn of(segment: &Segment, size: usize) -> Self {
        let Segment { rows, run, from_stride, to_stride, .. } = *segment;
        Self { rows, run: run * size, from_stride: from_stride * size, to_stride: to_stride * size }
    }

    /// Asks for the side that is adjacent, if one is: nothing tells the processor where the next start is.
    #[inline]
    pub fn prefetch(self, (from, to): Start) {
        let adjacent = match self.run {
            run if run == self.from_stride => from,
            run if run == self.to_stride => to.cast_const(),
            _ => return,
        };
        for at in (0..(self.rows * self.run).min(PREFETCHED)).step_by(LINE) {
            line(adjacent.wrapping_add(at));
        }
    }

    /// Copies the runs of every start: the first of all, then the second of all, ..
    ///
    /// A run of a few bytes is a load and a store of that length, or two that overlap: calling `memcpy` for it
    /// takes several times as long.
    ///
    /// # Safety
    /// From every start, all runs lie in memory that may be read and written, and what is read and what is written
    /// do not overlap.
    pub unsafe fn copy(self, starts: &[Start]) {
        // SAFETY: the caller's; each function copies runs of the lengths that it is chosen for.
        unsafe {
            match self.run {
                0 => {}
                1 => self.fixed::<1>(starts),
                2 => self.fixed::<2>(starts),
                4 => self.fixed::<4>(starts),
                8 => self.fixed::<8>(starts),
                16 => self.fixed::<16>(starts),
                32 => self.fixed::<32>(starts),
                64 => self.fixed::<64>(starts),
                3 => self.overlapping::<2>(starts),
                5..8 => self.overlapping::<4>(starts),
                9..16 => self.overlapping::<8>(starts),
                17..32 => self.overlapping::<16>(starts),
                33..64 => self.overlapping::<32>(starts),
                65..=128 => self.overlapping::<64>(starts),
                run => self.each(starts, |from, to| from.copy_to_nonoverlapping(to, run)),
            }
        }
    }

    /// Copies the runs of one start, the long ones past the caches.
    ///
    /// # Safety
    /// As of [`copy`](Self::copy); [`stream::done`] must follow before others may read.
    pub unsafe fn stream(self, start: Start) {
        // SAFETY: the caller's.
        unsafe { self.each(&[start], |from, to| stream::copy(from, to, self.run)) }
    }

    /// Runs of `N` bytes.
    unsafe fn fixed<const N: usize>(self, starts: &[Start]) {
        // SAFETY: the caller's; arrays of bytes need no alignment.
        unsafe { self.each(starts, |from, to| to.cast::<[u8; N]>().write(from.cast::<[u8; N]>().read())) }
    }

    /// Runs of `N` to `2 * N` bytes: the first `N` and the last.
    unsafe fn overlapping<const N: usize>(self, starts: &[Start]) {
        let last = self.run - N;
        // SAFETY: the caller's; arrays of bytes need no alignment.
        unsafe {
            self.each(starts, |from, to| {
                let first = from.cast::<[u8; N]>().read();
                let second = from.add(last).cast::<[u8; N]>().read();
                to.cast::<[u8; N]>().write(first);
                to.add(last).cast::<[u8; N]>().write(second);
            })
        }
    }

    /// Calls `copy` with the start of every run.
    #[inline(always)]
    unsafe fn each(self, starts: &[Start], copy: impl Fn(*const u8, *mut u8)) {
        for row in 0..self.rows {
            for (from, to) in starts {
                // SAFETY: the caller's.
                unsafe { copy(from.add(row * self.from_stride), to.add(row * self.to_stride)) }
            }
        }
    }
}

/// Asks for a line of the cache.
#[inline]
fn line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: any address may be asked for.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
