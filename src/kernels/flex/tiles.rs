//! Runs of two bytes side by side: a matrix transposed in tiles of four by four.

use super::rows::{Rows, Start};

/// Rows and columns of a tile.
const TILE: usize = 4;

/// Bytes of an element.
const SIZE: usize = 2;

/// Copies runs of two bytes as [`Rows::copy`] does, in tiles where four starts are side by side in the whole.
///
/// # Safety
/// As of [`Rows::copy`].
pub(super) unsafe fn copy(rows: Rows, starts: &[Start]) {
    debug_assert_eq!(rows.run, SIZE);
    let whole = rows.rows / TILE * TILE;
    for starts in starts.chunks(TILE) {
        let mut done = 0;
        if let [(from, to), _, _, _] = *starts {
            let beside =
                |start: fn(&Start) -> usize| (1..TILE).all(|at| start(&starts[at]) == start(&starts[0]) + at * SIZE);
            // SAFETY: the elements of four starts in four rows are those of the tile.
            if rows.from_stride == SIZE && beside(|start| start.1.addr()) {
                for row in (0..whole).step_by(TILE) {
                    let inputs = [0, 1, 2, 3].map(|at| starts[at].0.wrapping_add(row * SIZE));
                    let outputs = [0, 1, 2, 3].map(|at| to.wrapping_add((row + at) * rows.to_stride));
                    unsafe { tile(inputs, outputs) };
                }
                done = whole;
            } else if rows.to_stride == SIZE && beside(|start| start.0.addr()) {
                for row in (0..whole).step_by(TILE) {
                    let inputs = [0, 1, 2, 3].map(|at| from.wrapping_add((row + at) * rows.from_stride));
                    let outputs = [0, 1, 2, 3].map(|at| starts[at].1.wrapping_add(row * SIZE));
                    unsafe { tile(inputs, outputs) };
                }
                done = whole;
            }
        }
        for (from, to) in starts {
            let rest = Rows { rows: rows.rows - done, ..rows };
            // SAFETY: the rows behind the tiles.
            unsafe { rest.copy(&[(from.add(done * rows.from_stride), to.add(done * rows.to_stride))]) };
        }
    }
}

/// Four elements from each input: the first of all to the first output, the second of all to the second, ..
///
/// # Safety
/// Eight bytes may be read at each input, and written at each output.
#[inline(always)]
unsafe fn tile(inputs: [*const u8; TILE], outputs: [*mut u8; TILE]) {
    // SAFETY: the caller's; arrays of bytes need no alignment.
    let [a, b, c, d] = inputs.map(|input| u64::from_le_bytes(unsafe { input.cast::<[u8; 8]>().read() }));
    const EVEN: u64 = 0x0000_ffff_0000_ffff;
    const LOW: u64 = 0x0000_0000_ffff_ffff;
    // Squares of two by two elements are transposed, then the square of these squares.
    let pair = |x: u64, y: u64| [(x & EVEN) | ((y & EVEN) << 16), ((x >> 16) & EVEN) | (y & !EVEN)];
    let halves = |x: u64, y: u64| [(x & LOW) | (y << 32), (x >> 32) | (y & !LOW)];
    let ([ab0, ab1], [cd0, cd1]) = (pair(a, b), pair(c, d));
    let ([first, third], [second, fourth]) = (halves(ab0, cd0), halves(ab1, cd1));
    for (output, row) in outputs.into_iter().zip([first, second, third, fourth]) {
        // SAFETY: the caller's.
        unsafe { output.cast::<[u8; 8]>().write(row.to_le_bytes()) };
    }
}
