//! The copy kernel: every vector of the target memory looks up its sources.

use cubecl::prelude::*;

use super::tuning::{TASK_VECTORS, UNITS};

/// Words of a band, and of a column, in the table.
pub(super) const ENTRY: usize = 4;

/// Words before the first task in the table.
pub(super) const HEADER: usize = 4;

/// Source of a column of zeros.
pub(super) const ZEROS: u32 = u32::MAX;

/// Source of a lane.
#[derive(CubeType, Clone, Copy)]
struct LaneSource {
    source: u32,
    lane: usize,
    /// Number of lanes from this one on that are adjacent in the source.
    left: usize,
}

/// Writes a range of vectors of `target`.
///
/// `table` contains the range's first vector, its end, and the offsets of bands and columns. Then
/// follows the first band of each task. Then follow four words per band (first lane, lanes of a
/// row, first column, number of columns) and four words per column (first lane, source, first lane
/// in the source, distance between rows in the source).
#[cube(launch_unchecked)]
pub(super) fn copy<E: Numeric, N: Size>(
    sources: Sequence<Box<[Vector<E, N>]>>,
    table: &[u32],
    target: &mut [Vector<E, N>],
    #[define(E)] _dtype: ElemType,
) {
    let end = table[1] as usize;
    let begin = table[0] as usize + CUBE_POS * TASK_VECTORS;
    if begin < end {
        let low = table[HEADER + CUBE_POS] as usize;
        let high = table[HEADER + CUBE_POS + 1] as usize;
        let stop = min(begin + TASK_VECTORS, end);
        let mut at = begin + UNIT_POS as usize;
        while at < stop {
            target[at] = gather::<E, N>(&sources, table, at, low, high);
            at += UNITS;
        }
    }
}

/// Returns the source elements of vector `at` of the target.
#[cube]
fn gather<E: Numeric, N: Size>(
    sources: &Sequence<Box<[Vector<E, N>]>>,
    table: &[u32],
    at: usize,
    low: usize,
    high: usize,
) -> Vector<E, N> {
    let lanes = N::value();
    let place = locate(table, at * lanes, low, high);
    let mut value = Vector::<E, N>::new(E::from_int(0));
    if place.left >= lanes && (place.source == ZEROS || place.lane.is_multiple_of(lanes)) {
        if place.source != ZEROS {
            value = load::<E, N>(
                sources,
                place.source,
                place.lane / lanes,
                0usize,
                sources.len(),
            );
        }
    } else {
        for lane in 0..lanes {
            let place = locate(table, at * lanes + lane, low, high);
            if place.source != ZEROS {
                let vector = load::<E, N>(
                    sources,
                    place.source,
                    place.lane / lanes,
                    0usize,
                    sources.len(),
                );
                value.insert_dynamic(lane, vector.extract_dynamic(place.lane % lanes));
            }
        }
    }
    value
}

/// Looks up a lane of the target among bands `low..=high`.
#[cube]
fn locate(table: &[u32], lane: usize, low: usize, high: usize) -> LaneSource {
    let bands = table[2] as usize;
    let columns = table[3] as usize;
    let band = bands + ENTRY * search(table, bands, lane, low, high);
    let inside = lane - table[band] as usize;
    let stride = table[band + 1] as usize;
    let row = inside / stride;
    let column = inside % stride;
    let first = table[band + 2] as usize;
    let last = first + table[band + 3] as usize - 1;
    let found = search(table, columns, column, first, last);
    let entry = columns + ENTRY * found;
    let mut stop = stride;
    if found < last {
        stop = table[entry + ENTRY] as usize;
    }
    let start = table[entry] as usize;
    LaneSource {
        source: table[entry + 1],
        lane: table[entry + 2] as usize + row * table[entry + 3] as usize + (column - start),
        left: stop - column,
    }
}

/// Returns the last of the entries `low..=high` that does not begin after `key`.
#[cube]
fn search(table: &[u32], entries: usize, key: usize, low: usize, high: usize) -> usize {
    let mut low = low;
    let mut high = high;
    while low < high {
        let middle = (low + high + 1) / 2;
        if table[entries + ENTRY * middle] as usize <= key {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// Loads vector `at` of one of `count` sources starting at `first`, by binary search over the
/// sources.
#[cube]
fn load<E: Numeric, N: Size>(
    sources: &Sequence<Box<[Vector<E, N>]>>,
    source: u32,
    at: usize,
    #[comptime] first: usize,
    #[comptime] count: usize,
) -> Vector<E, N> {
    if comptime!(count == 0) {
        Vector::new(E::from_int(0))
    } else if comptime!(count == 1) {
        sources.index(first)[at]
    } else {
        let half = comptime!(count / 2);
        if source < comptime!((first + half) as u32) {
            load::<E, N>(sources, source, at, first, half)
        } else {
            load::<E, N>(
                sources,
                source,
                at,
                comptime!(first + half),
                comptime!(count - half),
            )
        }
    }
}
