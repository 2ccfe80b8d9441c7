//! Runs of several starts: those of one element, a matrix transposed, in squares that fill registers.

use smallvec::SmallVec;

use super::rows::{RowStart, StridedRows};

/// Copies runs as [`StridedRows::copy`] does; those of two and four bytes by tiles, where starts are side by side in the
/// source or in the target, and what each leads to is adjacent on the other side.
///
/// # Safety
/// As of [`StridedRows::copy`].
#[inline(always)]
pub(super) unsafe fn copy(rows: StridedRows, starts: impl Iterator<Item = RowStart>) {
    // SAFETY: the caller's.
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

/// `N` by `N` elements, of which the rows begin at the inputs: columns go to the outputs.
#[cfg(target_arch = "x86_64")]
type Tile<const N: usize> = unsafe fn([*const u8; N], [*mut u8; N]);

/// # Safety
/// As of [`StridedRows::copy`]; `N` elements are 16 bytes.
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
            // SAFETY: the elements of `N` rows from each start are those of the tile, adjacent in its rows and columns.
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
            // SAFETY: the rows behind the tiles.
            let behind = StridedRows { rows: rows.rows - full, ..rows };
            starts.iter().for_each(|start| unsafe { behind.copy(rows.start(*start, full)) });
        }
    }
    // SAFETY: the caller's.
    rest.iter().for_each(|start| unsafe { rows.copy(*start) });
}

/// Tiles in the registers that every x86-64 has.
#[cfg(target_arch = "x86_64")]
mod sse2 {
    use std::arch::x86_64::*;

    /// # Safety
    /// 16 bytes may be read at each input and written at each output.
    #[inline(always)]
    pub unsafe fn of_four_bytes(inputs: [*const u8; 4], outputs: [*mut u8; 4]) {
        // SAFETY: the caller's; x86-64 has SSE2, and these need no alignment.
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

    /// # Safety
    /// 16 bytes may be read at each input and written at each output.
    #[inline(always)]
    pub unsafe fn of_two_bytes(inputs: [*const u8; 8], outputs: [*mut u8; 8]) {
        // SAFETY: as above.
        unsafe {
            let rows = inputs.map(|input| _mm_loadu_si128(input.cast()));
            // Elements of two rows, pairs of four rows, and fours of eight rows, side by side.
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

    /// # Safety
    /// 16 bytes may be written at each output.
    #[inline(always)]
    unsafe fn write<const N: usize>(outputs: [*mut u8; N], columns: [__m128i; N]) {
        for (output, column) in outputs.into_iter().zip(columns) {
            // SAFETY: the caller's; no alignment is needed.
            unsafe { _mm_storeu_si128(output.cast(), column) };
        }
    }
}
