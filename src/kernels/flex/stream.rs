//! Long runs of large copies, past the caches.
//!
//! A store reads the line of the cache that it changes. Where so much is written that none of it stays in the caches,
//! that is a third of the traffic, and for nothing.

/// Copies that write fewer bytes may find them in the caches afterwards.
const LARGE: usize = 8 << 20;

/// Shorter runs, in bytes, are more edge than inside.
const LONG: usize = 512;

/// Bytes of a line of the cache.
const LINE: usize = 64;

/// Bytes that are read together: a few lines, so that several are on their way at once.
const BLOCK: usize = 4 * LINE;

/// Long runs are walked at so many places at once: what one page of memory makes wait for, others do not.
const STRIPES: usize = 4;

/// Shorter ones are walked at one place.
const STRIPED: usize = 12 << 10;

/// Bytes between those places at most: their pages must be known to the processor all the time.
const FAR: usize = 64 << 10;

/// Whether a copy that writes `bytes` in all streams its long runs.
pub(crate) fn pays(bytes: usize) -> bool {
    cfg!(target_arch = "x86_64") && bytes >= LARGE
}

/// Whether runs of `len` bytes are.
pub(crate) fn is_long(len: usize) -> bool {
    len >= LONG
}

/// Copies `len` bytes, past the caches if that is long; [`done`] must follow before others may read them.
///
/// # Safety
/// As many bytes may be read at `from` and written at `to`, and the two do not overlap.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if is_long(len) {
            return lines(from, to, len);
        }
        from.copy_to_nonoverlapping(to, len);
    }
}

/// Lets others see what this thread has copied.
pub(crate) fn done() {
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
    // SAFETY: the caller's; from `head` on the lines of the target are aligned.
    unsafe {
        let head = to.align_offset(LINE).min(len);
        from.copy_to_nonoverlapping(to, head);
        let mut at = head;
        while len - at >= STRIPED {
            let stripe = ((len - at) / STRIPES).min(FAR) / BLOCK * BLOCK;
            stripes::<STRIPES>(from.add(at), to.add(at), stripe);
            at += STRIPES * stripe;
        }
        let rest = (len - at) / BLOCK * BLOCK;
        stripes::<1>(from.add(at), to.add(at), rest);
        at += rest;
        from.add(at).copy_to_nonoverlapping(to.add(at), len - at);
    }
}

/// Copies `N` stripes of `len` bytes, one behind the other in memory, side by side in time.
///
/// # Safety
/// As of [`copy`] for all of them; `to` is aligned to a line, and `len` a multiple of [`BLOCK`].
#[cfg(target_arch = "x86_64")]
unsafe fn stripes<const N: usize>(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    for block in (0..len).step_by(BLOCK) {
        for stripe in 0..N {
            for line in (0..BLOCK).step_by(LINE) {
                let at = stripe * len + block + line;
                // SAFETY: the caller's; streaming stores must be aligned.
                unsafe {
                    let (from, to) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
                    let parts = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
                    for (part, value) in parts.into_iter().enumerate() {
                        _mm_stream_si128(to.add(part), value);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::kernels::flex::rows::Rows;

    #[test]
    fn runs_are_streamed_whole_wherever_they_begin_and_nothing_beside_them() {
        const SIZE: usize = 1_000_000;
        let source: Vec<u8> = (0..SIZE).map(|at| (at * 7 + at / 251) as u8 | 1).collect();
        // One stripe, four of less than their longest, and of the longest and then some.
        for (run, from, to) in [
            (1, 0, 0),
            (511, 1, 2),
            (513, 5, 3),
            (4095, 3, 5),
            (4096, 0, 0),
            (4097, 1, 63),
            (5003, 17, 1),
            (12_351, 5, 1),
            (16_384, 64, 33),
            (100_001, 3, 7),
            (300_000, 0, 64),
            (300_123, 1, 2),
        ] {
            let (from_stride, to_stride) = (run + 9, run + 2);
            let mut target = vec![0; SIZE];
            let rows = Rows { rows: 3, run, from_stride, to_stride };
            // SAFETY: three runs of at most 300,123 bytes end before a million.
            unsafe { rows.stream((source.as_ptr().add(from), target.as_mut_ptr().add(to))) };
            super::done();
            let mut expected = vec![0; SIZE];
            for row in 0..3 {
                for at in 0..run {
                    expected[to + row * to_stride + at] = source[from + row * from_stride + at];
                }
            }
            assert!(target == expected, "runs of {run} bytes from {from} to {to}");
        }
    }
}
