//! Long runs of large copies, past the caches.
//!
//! A store reads the line of the cache that it changes. Where so much is written that none of it stays in the caches,
//! that is a third of the traffic, and for nothing.

/// Copies that write fewer bytes may find them in the caches afterwards.
const LARGE: usize = 96 << 20;

/// Shorter runs, in bytes, are more edge than inside.
const LONG: usize = 2 << 10;

/// Whether a copy that writes `bytes` in all streams its long runs.
pub(super) fn pays(bytes: usize) -> bool {
    cfg!(target_arch = "x86_64") && bytes >= LARGE
}

/// Copies `len` bytes, past the caches if that is long; [`done`] must follow before others may read them.
///
/// # Safety
/// As many bytes may be read at `from` and written at `to`, and the two do not overlap.
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if len >= LONG {
            return lines(from, to, len);
        }
        from.copy_to_nonoverlapping(to, len);
    }
}

/// Lets others see what this thread has copied.
pub(super) fn done() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has this instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// # Safety
/// As of [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn lines(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_stream_si128};

    const LINE: usize = 64;
    // The processor looks ahead by itself, but not beyond a page.
    const AHEAD: usize = 2048;
    let head = to.align_offset(LINE).min(len);
    let end = head + (len - head) / LINE * LINE;
    // SAFETY: the caller's; whole lines of the target are aligned, as streaming stores must be.
    unsafe {
        from.copy_to_nonoverlapping(to, head);
        for at in (head..end).step_by(LINE) {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + AHEAD).cast());
            let (from, to) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
            let line = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
            for (part, value) in line.into_iter().enumerate() {
                _mm_stream_si128(to.add(part), value);
            }
        }
        from.add(end).copy_to_nonoverlapping(to.add(end), len - end);
    }
}

#[cfg(test)]
mod tests {
    use crate::kernels::flex::rows::Rows;

    #[test]
    fn runs_are_streamed_whole_wherever_they_begin_and_nothing_beside_them() {
        let source: Vec<u8> = (0..40_000_u32).map(|at| (at * 7 + at / 251) as u8 | 1).collect();
        for (run, from, to) in [(1, 0, 0), (2047, 3, 5), (2048, 0, 0), (2049, 1, 63), (5003, 17, 1), (8192, 64, 33)] {
            let (from_stride, to_stride) = (run + 9, run + 2);
            let mut target = vec![0; 40_000];
            let rows = Rows { rows: 3, run, from_stride, to_stride };
            // SAFETY: three runs of at most 8192 bytes end before 40,000.
            unsafe { rows.stream((source.as_ptr().add(from), target.as_mut_ptr().add(to))) };
            super::done();
            let mut expected = vec![0; 40_000];
            for row in 0..3 {
                for at in 0..run {
                    expected[to + row * to_stride + at] = source[from + row * from_stride + at];
                }
            }
            assert!(target == expected, "runs of {run} bytes from {from} to {to}");
        }
    }
}
