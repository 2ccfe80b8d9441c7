//! [`StridedRows`]: runs of bytes at equal distances.

use super::prefetch::{LINE, prefetch};
use crate::kernels::StridedCopy;

/// Bytes that one instruction loads or stores, if registers are long enough.
const BLOCK: usize = 32;

/// Bytes of a long run that are copied per iteration.
const BLOCKS: usize = 4 * BLOCK;

/// Minimum bytes of runs that are copied by `memcpy`, which uses instructions that write complete lines without
/// reading them.
const MEMCPY: usize = 64 << 10;

/// Minimum bytes of runs whose next but one is prefetched, if runs are apart in the source. The hardware prefetcher
/// does not find the next run by itself.
const PREFETCH_BYTES: usize = 512;

/// Bytes of a page.
const PAGE: usize = 4 << 10;

/// Runs of bytes at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StridedRows {
    pub rows: usize,
    /// Bytes of each run.
    pub run: usize,
    /// Distance between the starts of two runs in the source.
    pub from_stride: usize,
    /// Distance between the starts of two runs in the target.
    pub to_stride: usize,
}

/// Addresses at which the first run is read and written.
pub(super) type RowStart = (*const u8, *mut u8);

impl StridedRows {
    /// Returns the runs of `segment` with elements of `size` bytes.
    pub fn of(segment: &StridedCopy, size: usize) -> Self {
        let StridedCopy { rows, run, from_stride, to_stride, .. } = *segment;
        Self { rows, run: run * size, from_stride: from_stride * size, to_stride: to_stride * size }
    }

    /// Returns the addresses at which run `row` is read and written.
    ///
    /// # Safety
    /// `row` is less than the number of runs from `start`.
    pub unsafe fn start(self, (from, to): RowStart, row: usize) -> RowStart {
        // SAFETY: guaranteed by the caller.
        unsafe { (from.add(row * self.from_stride), to.add(row * self.to_stride)) }
    }

    /// Copies the runs.
    ///
    /// Only very long runs use `memcpy`. For a run of a few bytes a call takes several times as long. On some
    /// processors it also takes ten times as long if the target begins a few bytes after the source modulo the page
    /// size, as about one percent of long runs do.
    ///
    /// # Safety
    /// From `start`, all runs are in memory that may be read and written. What is read does not overlap what is
    /// written.
    #[inline]
    pub unsafe fn copy(self, start: RowStart) {
        /// Like `by_length`, but compiled for AVX2. Its registers are twice as long as those that every x86-64
        /// processor has.
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        unsafe fn by_avx2(rows: StridedRows, start: RowStart) {
            // SAFETY: guaranteed by the caller.
            unsafe { rows.by_length(start) }
        }
        // SAFETY: guaranteed by the caller; the processor supports the instructions.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") {
                return by_avx2(self, start);
            }
            self.by_length(start);
        }
    }

    /// Copies the runs in a loop that is specialized for their length.
    ///
    /// # Safety
    /// Like [`copy`](Self::copy).
    #[inline(always)]
    unsafe fn by_length(self, start: RowStart) {
        // SAFETY: guaranteed by the caller; each loop copies runs of the lengths for which it is selected.
        unsafe {
            match self.run {
                0 => {}
                1 => self.short::<1, 1>(start),
                2 => self.short::<1, 2>(start),
                3 => self.short::<2, 2>(start),
                4 => self.short::<1, 4>(start),
                5..8 => self.short::<2, 4>(start),
                8 => self.short::<1, 8>(start),
                9..16 => self.short::<2, 8>(start),
                16 => self.short::<1, 16>(start),
                17..32 => self.short::<2, 16>(start),
                32 => self.short::<1, BLOCK>(start),
                33..=64 => self.short::<2, BLOCK>(start),
                65..=96 => self.short::<3, BLOCK>(start),
                97..=128 => self.short::<4, BLOCK>(start),
                run @ PREFETCH_BYTES..MEMCPY if self.rows > 1 && self.from_stride > run => {
                    self.each(start, |from, to| long::<true>(from, to, run, 2 * self.from_stride));
                }
                run @ ..MEMCPY => self.each(start, |from, to| long::<false>(from, to, run, 0)),
                run => self.each(start, |from, to| match (to.addr().wrapping_sub(from.addr())) % PAGE {
                    1..LINE => long::<false>(from, to, run, 0),
                    _ => from.copy_to_nonoverlapping(to, run),
                }),
            }
        }
    }

    /// Copies runs of `COUNT` blocks of `SIZE` bytes. The last block may overlap the one before.
    ///
    /// # Safety
    /// Like [`copy`](Self::copy). A run has at most `COUNT * SIZE` bytes, and more than `(COUNT - 1) * SIZE`.
    #[inline(always)]
    unsafe fn short<const COUNT: usize, const SIZE: usize>(self, start: RowStart) {
        let last = self.run - SIZE;
        // SAFETY: guaranteed by the caller.
        self.each(start, |from, to| unsafe {
            for task in 0..COUNT - 1 {
                bytes::<SIZE>(from.add(task * SIZE), to.add(task * SIZE));
            }
            bytes::<SIZE>(from.add(last), to.add(last));
        })
    }

    /// Calls `copy` with the start of every run.
    #[inline(always)]
    fn each(self, start: RowStart, copy: impl Fn(*const u8, *mut u8)) {
        let (mut from, mut to) = start;
        for _ in 0..self.rows {
            copy(from, to);
            // The addresses after the last run are not used, and may be invalid.
            (from, to) = (from.wrapping_add(self.from_stride), to.wrapping_add(self.to_stride));
        }
    }
}

/// Copies a run of at least [`BLOCKS`] bytes: a block that may be unaligned, then aligned ones, then the last ones.
/// If `PREFETCHES`, the bytes at `distance` from them in the source are prefetched.
///
/// # Safety
/// Like [`StridedRows::copy`], for one run.
#[inline(always)]
unsafe fn long<const PREFETCHES: bool>(from: *const u8, to: *mut u8, len: usize, distance: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        bytes::<BLOCK>(from, to);
        let mut at = BLOCK - to.addr() % BLOCK;
        while at + BLOCKS < len {
            if PREFETCHES {
                (0..BLOCKS).step_by(LINE).for_each(|line| prefetch(from.wrapping_add(at + distance + line)));
            }
            bytes::<BLOCKS>(from.add(at), to.add(at));
            at += BLOCKS;
        }
        bytes::<BLOCKS>(from.add(len - BLOCKS), to.add(len - BLOCKS));
    }
}

/// Copies `N` bytes. `N` is so small that this compiles to loads and stores instead of a call.
///
/// # Safety
/// Like [`StridedRows::copy`].
#[inline(always)]
unsafe fn bytes<const N: usize>(from: *const u8, to: *mut u8) {
    // SAFETY: guaranteed by the caller.
    unsafe { from.copy_to_nonoverlapping(to, N) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Checks that `copy` writes the runs of `rows`, which begin at these bytes of source and target, and nothing
    /// else.
    pub fn assert_copied(rows: StridedRows, (from, to): (usize, usize), copy: impl Fn(StridedRows, RowStart)) {
        let StridedRows { run, from_stride, to_stride, .. } = rows;
        let source: Vec<u8> =
            (0..from + rows.rows * from_stride + run).map(|at| (at * 7 + at / 251) as u8 | 1).collect();
        let mut target = vec![0; to + rows.rows * to_stride + run];
        let mut expected = target.clone();
        for row in 0..rows.rows {
            let (from, to) = (from + row * from_stride, to + row * to_stride);
            expected[to..to + run].copy_from_slice(&source[from..from + run]);
        }
        copy(rows, (source[from..].as_ptr(), target[to..].as_mut_ptr()));
        assert!(target == expected, "{rows:?} from {from} to {to}");
    }

    #[test]
    fn runs_of_every_length_are_copied_completely_and_nothing_else() {
        for run in (0..=300).chain([1000, 4096, 5001, 65_535, 65_536, 100_003]) {
            for (from, to) in [(0, 0), (3, 1), (31, 32), (32, 31)] {
                let rows = StridedRows { rows: 3, run, from_stride: run + 5, to_stride: run + 1 };
                // SAFETY: the test's memory is long enough.
                assert_copied(rows, (from, to), |rows, start| unsafe { rows.copy(start) });
                // SAFETY: the test's memory is long enough.
                assert_copied(rows, (from, to), |rows, start| unsafe { rows.by_length(start) });
            }
        }
    }

    #[test]
    fn very_long_runs_are_copied_completely_wherever_source_and_target_lie_within_a_page() {
        let len = MEMCPY + 100;
        let source: Vec<u8> = (0..len + PAGE).map(|at| (at * 7 + at / 251) as u8 | 1).collect();
        for beyond in [0, 1, 17, 63, 64, 4095] {
            let mut target = vec![0_u8; len + 2 * PAGE];
            let start = (source.as_ptr().addr() + beyond).wrapping_sub(target.as_ptr().addr()) % PAGE;
            let rows = StridedRows { rows: 1, run: len, from_stride: len, to_stride: len };
            // SAFETY: the test's memory is long enough.
            unsafe { rows.copy((source.as_ptr(), target[start..].as_mut_ptr())) };
            assert!(target[start..start + len] == source[..len], "{beyond} bytes beyond");
            assert!(
                target[..start].iter().chain(&target[start + len..]).all(|byte| *byte == 0),
                "{beyond} bytes beyond"
            );
        }
    }
}
