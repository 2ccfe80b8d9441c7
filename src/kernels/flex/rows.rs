//! [`StridedRows`]: runs of bytes at equal distances.

use crate::kernels::StridedCopy;

/// Bytes of the largest block that is copied by loads and stores: two registers that every x86-64
/// and AArch64 processor has.
const BLOCK: usize = 32;

/// Runs of bytes at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StridedRows {
    rows: usize,
    /// Bytes of each run.
    run: usize,
    /// Distance between the starts of two runs in the source.
    from_stride: usize,
    /// Distance between the starts of two runs in the target.
    to_stride: usize,
}

/// Addresses at which the first run is read and written.
pub(super) type RowStart = (*const u8, *mut u8);

impl StridedRows {
    /// Returns the runs of `segment` with elements of `size` bytes.
    pub fn of(segment: &StridedCopy, size: usize) -> Self {
        let StridedCopy {
            rows,
            run,
            from_stride,
            to_stride,
            ..
        } = *segment;
        Self {
            rows,
            run: run * size,
            from_stride: from_stride * size,
            to_stride: to_stride * size,
        }
    }

    /// Copies the runs: short ones in a loop that is specialized for their length, others by
    /// `memcpy`.
    ///
    /// Shards along any dimension but the first consist of short runs, and a call of `memcpy` takes
    /// several times as long as copying a few bytes.
    ///
    /// # Safety
    /// From `start`, all runs are in memory that may be read and written. What is read does not
    /// overlap what is written.
    pub unsafe fn copy(self, start: RowStart) {
        // SAFETY: guaranteed by the caller; each loop copies runs of the lengths for which it is
        // selected.
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
                run => self.each(start, |from, to| from.copy_to_nonoverlapping(to, run)),
            }
        }
    }

    /// Copies runs of `COUNT` blocks of `SIZE` bytes. The last block may overlap the one before.
    /// Blocks are so small that each compiles to loads and stores instead of a call.
    ///
    /// # Safety
    /// Like [`copy`](Self::copy). A run has at most `COUNT * SIZE` bytes, and more than `(COUNT -
    /// 1) * SIZE`.
    #[inline(always)]
    unsafe fn short<const COUNT: usize, const SIZE: usize>(self, start: RowStart) {
        let last = self.run - SIZE;
        // SAFETY: guaranteed by the caller.
        self.each(start, |from, to| unsafe {
            for block in 0..COUNT - 1 {
                from.add(block * SIZE)
                    .copy_to_nonoverlapping(to.add(block * SIZE), SIZE);
            }
            from.add(last).copy_to_nonoverlapping(to.add(last), SIZE);
        })
    }

    /// Calls `copy` with the start of every run.
    #[inline(always)]
    fn each(self, start: RowStart, copy: impl Fn(*const u8, *mut u8)) {
        let (mut from, mut to) = start;
        for _ in 0..self.rows {
            copy(from, to);
            // The addresses after the last run are not used, and may be invalid.
            (from, to) = (
                from.wrapping_add(self.from_stride),
                to.wrapping_add(self.to_stride),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the runs of `rows`, which begin at these bytes of source and target, are copied,
    /// and nothing else is written.
    fn assert_copied(rows: StridedRows, (from, to): (usize, usize)) {
        let StridedRows {
            run,
            from_stride,
            to_stride,
            ..
        } = rows;
        let source: Vec<u8> = (0..from + rows.rows * from_stride + run)
            .map(|at| (at * 7 + at / 251) as u8 | 1)
            .collect();
        let mut target = vec![0; to + rows.rows * to_stride + run];
        let mut expected = target.clone();
        for row in 0..rows.rows {
            let from = from + row * from_stride;
            let to = to + row * to_stride;
            expected[to..to + run].copy_from_slice(&source[from..from + run]);
        }
        // SAFETY: source and target have all runs.
        unsafe { rows.copy((source[from..].as_ptr(), target[to..].as_mut_ptr())) };
        assert!(target == expected, "{rows:?} from {from} to {to}");
    }

    #[test]
    fn runs_of_every_length_are_copied_completely_and_nothing_else() {
        for run in (0..=300).chain([1000, 5001, 65_536]) {
            for start in [(0, 0), (3, 1), (31, 32), (32, 31)] {
                assert_copied(
                    StridedRows {
                        rows: 3,
                        run,
                        from_stride: run + 5,
                        to_stride: run + 1,
                    },
                    start,
                );
            }
        }
    }
}
