//! Copies runs from several starts. Runs of one element form a matrix, which is transposed in square tiles that fit
//! in registers.

use smallvec::SmallVec;

use super::rows::{RowStart, StridedRows};

/// Copies runs as [`StridedRows::copy`] does. Runs of two and four bytes are copied by tiles if the starts are
/// adjacent on one side (source or target) and the rows of each start are adjacent on the other side.
///
/// # Safety
/// Like [`StridedRows::copy`].
#[inline(always)]
pub(super) unsafe fn copy(rows: StridedRows, starts: impl Iterator<Item = RowStart>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match rows.run {
            #[cfg(target_arch = "x86_64")]
            2 => by_tiles::<8>(rows, starts, sse2::of_two_bytes),
            #[cfg(target_arch = "x86_64")]
            4 => by_tiles::<4>(rows, starts, sse2::of_four_bytes),
            _ => starts.for_each(|start| rows.copy(start)),
        }
    }
}

/// Transposes `N` by `N` elements: the rows begin at the inputs, and the columns are written to the outputs.
#[cfg(target_arch = "x86_64")]
type Tile<const N: usize> = unsafe fn([*const u8; N], [*mut u8; N]);

/// Copies runs of one element, by tiles if possible.
///
/// # Safety
/// Like [`StridedRows::copy`]. In addition, `N` elements have 16 bytes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn by_tiles<const N: usize>(rows: StridedRows, starts: impl Iterator<Item = RowStart>, tile: Tile<N>) {
    let starts: SmallVec<[RowStart; 16]> = starts.collect();
    let StridedRows { run: size, from_stride, to_stride, .. } = rows;
    let (tiles, rest) = starts.as_chunks::<N>();
    for starts in tiles {
        let (from, to) = (starts.map(|start| start.0), starts.map(|start| start.1));
        let other = |at: &dyn Fn(usize) -> usize| (1..N).all(|start| at(start) == at(0) + start * size);
        let gathers = from_stride == size && other(&|start| to[start].addr());
        let spreads = to_stride == size && other(&|start| from[start].addr());
        let full = if gathers || spreads { rows.rows / N * N } else { 0 };
        for row in (0..full).step_by(N) {
            // SAFETY: the elements of `N` rows from each start are those of the tile, adjacent in its rows and
            // columns.
            unsafe {
                if gathers {
                    let lines = std::array::from_fn(|line| to[0].add((row + line) * to_stride));
                    tile(from.map(|from| from.add(row * size)), lines);
                } else {
                    let lines = std::array::from_fn(|line| from[0].add((row + line) * from_stride));
                    tile(lines, to.map(|to| to.add(row * size)));
                }
            }
        }
        if full < rows.rows {
            // SAFETY: these are the rows after the tiles.
            let behind = StridedRows { rows: rows.rows - full, ..rows };
            starts.iter().for_each(|start| unsafe { behind.copy(rows.start(*start, full)) });
        }
    }
    // SAFETY: guaranteed by the caller.
    rest.iter().for_each(|start| unsafe { rows.copy(*start) });
}

/// Tiles in SSE2 registers, which every x86-64 processor has.
#[cfg(target_arch = "x86_64")]
mod sse2 {
    use std::arch::x86_64::*;

    /// Transposes a tile of four-byte elements.
    ///
    /// # Safety
    /// 16 bytes may be read at each input and written at each output.
    #[inline(always)]
    pub unsafe fn of_four_bytes(inputs: [*const u8; 4], outputs: [*mut u8; 4]) {
        // SAFETY: guaranteed by the caller; x86-64 has SSE2, and these instructions need no alignment.
        unsafe {
            let [a, b, c, d] = inputs.map(|input| _mm_loadu_si128(input.cast()));
            let (ab, cd) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
            let (ab_high, cd_high) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
            write(
                outputs,
                [
                    _mm_unpacklo_epi64(ab, cd),
                    _mm_unpackhi_epi64(ab, cd),
                    _mm_unpacklo_epi64(ab_high, cd_high),
                    _mm_unpackhi_epi64(ab_high, cd_high),
                ],
            );
        }
    }

    /// Transposes a tile of two-byte elements.
    ///
    /// # Safety
    /// 16 bytes may be read at each input and written at each output.
    #[inline(always)]
    pub unsafe fn of_two_bytes(inputs: [*const u8; 8], outputs: [*mut u8; 8]) {
        // SAFETY: as above.
        unsafe {
            let rows = inputs.map(|input| _mm_loadu_si128(input.cast()));
            // Interleaves the elements of two rows, then pairs of four rows, then groups of four of eight rows.
            let pairs = |low: usize| {
                [_mm_unpacklo_epi16(rows[low], rows[low + 1]), _mm_unpackhi_epi16(rows[low], rows[low + 1])]
            };
            let (ab, cd, ef, gh) = (pairs(0), pairs(2), pairs(4), pairs(6));
            let fours = |left: [__m128i; 2], right: [__m128i; 2]| {
                [
                    _mm_unpacklo_epi32(left[0], right[0]),
                    _mm_unpackhi_epi32(left[0], right[0]),
                    _mm_unpacklo_epi32(left[1], right[1]),
                    _mm_unpackhi_epi32(left[1], right[1]),
                ]
            };
            let (abcd, efgh) = (fours(ab, cd), fours(ef, gh));
            write(
                outputs,
                [
                    _mm_unpacklo_epi64(abcd[0], efgh[0]),
                    _mm_unpackhi_epi64(abcd[0], efgh[0]),
                    _mm_unpacklo_epi64(abcd[1], efgh[1]),
                    _mm_unpackhi_epi64(abcd[1], efgh[1]),
                    _mm_unpacklo_epi64(abcd[2], efgh[2]),
                    _mm_unpackhi_epi64(abcd[2], efgh[2]),
                    _mm_unpacklo_epi64(abcd[3], efgh[3]),
                    _mm_unpackhi_epi64(abcd[3], efgh[3]),
                ],
            );
        }
    }

    /// Writes the columns of a tile.
    ///
    /// # Safety
    /// 16 bytes may be written at each output.
    #[inline(always)]
    unsafe fn write<const N: usize>(outputs: [*mut u8; N], columns: [__m128i; N]) {
        for (output, column) in outputs.into_iter().zip(columns) {
            // SAFETY: guaranteed by the caller; no alignment is needed.
            unsafe { _mm_storeu_si128(output.cast(), column) };
        }
    }
}
