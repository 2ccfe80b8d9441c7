//! Stores that bypass the caches, for long runs of large copies.
//!
//! An ordinary store first reads the cache line that it changes. If a copy is so large that nothing of it stays in
//! the caches, that read is a third of the traffic and has no use.

use super::prefetch::LINE;
use super::rows::{RowStart, StridedRows};

/// Minimum bytes of a copy that is streamed. The result of a smaller copy may still be in the caches when it is
/// read.
const LARGE: usize = 16 << 20;

/// Minimum bytes of a streamed run. Shorter runs consist mostly of unaligned edges.
const LONG: usize = 512;

/// Minimum bytes of a streamed run if runs are apart in the source. Shorter ones are read faster one at a time than
/// several at once.
const LONG_APART: usize = 2 << 10;

/// Bytes that are read together: a few lines, so that several reads are in flight.
const BLOCK: usize = 4 * LINE;

/// Number of positions at which memory is traversed at once. An access that waits for one page does not delay the
/// others.
const STRIPES: usize = 4;

/// Number of rows after which a row is prefetched, if rows are apart in the source. The hardware prefetcher does
/// not find the next row by itself.
const PREFETCH_LINES: usize = 2;

/// Minimum bytes of a run that is divided into stripes, which are copied at the same time. Of shorter runs, several
/// are copied at the same time.
const STRIPED: usize = 12 << 10;

/// Maximum bytes between two stripes. The processor must hold the address translations of all their pages.
const FAR: usize = 64 << 10;

/// Returns true if a copy that writes `bytes` bytes streams its long runs.
pub(crate) fn pays(bytes: usize) -> bool {
    cfg!(target_arch = "x86_64") && bytes >= LARGE
}

/// Returns true if the runs of `rows` are long enough to be streamed.
pub(super) fn are_long(rows: &StridedRows) -> bool {
    let lie_apart = rows.rows > 1 && rows.run < rows.from_stride;
    rows.run >= if lie_apart { LONG_APART } else { LONG }
}

/// Copies the runs of `rows`, which are [long](LONG), and bypasses the caches. Call [`done`] before other threads
/// may read them.
///
/// ```text
/// rows   0 1 2 3 4 5 6 7 8      at once: 0 2 4 6, then 1 3 5 7, then 8
/// ```
///
/// # Safety
/// Like [`StridedRows::copy`].
pub(super) unsafe fn rows(rows: StridedRows, start: RowStart) {
    let band = if rows.run < STRIPED { rows.rows / STRIPES } else { 0 };
    let distance = if rows.run < rows.from_stride { PREFETCH_LINES * rows.from_stride } else { 0 };
    // SAFETY: guaranteed by the caller.
    unsafe {
        for row in 0..band {
            let runs = std::array::from_fn(|stripe| rows.start(start, row + stripe * band));
            side_by_side::<STRIPES>(runs, rows.run, distance);
        }
        for row in STRIPES * band..rows.rows {
            let (from, to) = rows.start(start, row);
            copy(from, to, rows.run);
        }
    }
}

/// Copies `len` bytes, and bypasses the caches if they are many. Call [`done`] before other threads may read them.
///
/// # Safety
/// `len` bytes may be read at `from` and written at `to`, and the two do not overlap.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= STRIPED && std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: guaranteed by the caller; the processor supports the instructions.
        return unsafe { by_lines(from, to, len) };
    }
    let mut at = 0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        while len - at >= STRIPED {
            let stripe = ((len - at) / STRIPES).min(FAR) / BLOCK * BLOCK;
            let place = |index: usize| (from.add(at + index * stripe), to.add(at + index * stripe));
            side_by_side::<STRIPES>(std::array::from_fn(place), stripe, 0);
            at += STRIPES * stripe;
        }
        let rest = (from.add(at), to.add(at));
        match len - at >= LONG {
            true => side_by_side([rest], len - at, 0),
            false => rest.0.copy_to_nonoverlapping(rest.1, len - at),
        }
    }
}

/// Copies `len` bytes, which is [long](LONG), with one store per cache line. No stores must be combined to a line
/// then, and a single traversal is faster than several at once.
///
/// # Safety
/// Like [`copy`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn by_lines(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    let head = to.align_offset(LINE);
    let inside = (len - head) / LINE * LINE;
    // SAFETY: guaranteed by the caller; streaming stores must be aligned.
    unsafe {
        from.copy_to_nonoverlapping(to, head);
        let (from, to) = (from.add(head), to.add(head));
        for line in (0..inside).step_by(LINE) {
            _mm512_stream_si512(to.add(line).cast(), _mm512_loadu_si512(from.add(line).cast()));
        }
        from.add(inside).copy_to_nonoverlapping(to.add(inside), len - head - inside);
    }
}

/// Makes the streamed stores of this thread visible to other threads.
pub(crate) fn done() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has this instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Copies `N` runs of `len` bytes, which is [long](LONG), one block of each in turn. If `distance` is not 0, also
/// prefetches the bytes at that distance in the sources.
///
/// # Safety
/// Like [`copy`], for all runs.
#[cfg(target_arch = "x86_64")]
unsafe fn side_by_side<const N: usize>(runs: [RowStart; N], len: usize, distance: usize) {
    use std::arch::x86_64::{__m128i, _MM_HINT_T1, _mm_loadu_si128, _mm_prefetch, _mm_stream_si128};
    // After its head, the lines of a target are aligned.
    let heads = runs.map(|(_, to)| to.align_offset(LINE));
    let inside = (len - heads.into_iter().max().unwrap_or(0)) / LINE * LINE;
    // SAFETY: guaranteed by the caller; streaming stores must be aligned.
    unsafe {
        let runs = std::array::from_fn::<_, N, _>(|run| {
            let ((from, to), head) = (runs[run], heads[run]);
            from.copy_to_nonoverlapping(to, head);
            (from.add(head), to.add(head))
        });
        for at in (0..inside).step_by(BLOCK) {
            for (from, to) in runs {
                for line in (at..inside.min(at + BLOCK)).step_by(LINE) {
                    if distance > 0 {
                        _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line + distance).cast());
                    }
                    let (from, to) = (from.add(line).cast::<__m128i>(), to.add(line).cast::<__m128i>());
                    let parts = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
                    for (part, value) in parts.into_iter().enumerate() {
                        _mm_stream_si128(to.add(part), value);
                    }
                }
            }
        }
        for ((from, to), head) in runs.into_iter().zip(heads) {
            from.add(inside).copy_to_nonoverlapping(to.add(inside), len - head - inside);
        }
    }
}

/// Copies `N` runs of `len` bytes. On this architecture, nothing bypasses the caches.
///
/// # Safety
/// Like [`copy`], for all runs.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn side_by_side<const N: usize>(runs: [RowStart; N], len: usize, _distance: usize) {
    for (from, to) in runs {
        // SAFETY: guaranteed by the caller.
        unsafe { from.copy_to_nonoverlapping(to, len) }
    }
}

#[cfg(test)]
mod tests {
    use crate::kernels::flex::rows::{StridedRows, tests};

    #[test]
    fn runs_that_lie_apart_in_the_source_are_long_later() {
        let are_long =
            |rows, run, from_stride| super::are_long(&StridedRows { rows, run, from_stride, to_stride: 9999 });
        assert_eq!([511, 512].map(|run| are_long(9, run, run)), [false, true]);
        assert_eq!([2047, 2048].map(|run| are_long(9, run, run + 1)), [false, true]);
        assert!(are_long(1, 512, 9999), "a single run is not apart from another");
    }

    #[test]
    fn runs_are_streamed_completely_wherever_they_begin_and_nothing_else() {
        // Cases: four runs at once and a single one; one stripe, four stripes shorter than the maximum, and four of
        // the maximum with a rest.
        for run in [512, 513, 767, 1024, 4095, 4096, 5003, 12_287, 12_351, 16_384, 100_001, 300_000] {
            for (from, to) in [(0, 0), (1, 2), (17, 1), (5, 63), (64, 33)] {
                let rows = StridedRows { rows: 9, run, from_stride: run + 9, to_stride: run + 2 };
                tests::assert_copied(rows, (from, to), |rows, start| {
                    // SAFETY: the test's memory is long enough.
                    unsafe { super::rows(rows, start) };
                    super::done();
                });
            }
        }
    }
}
