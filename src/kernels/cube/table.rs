//! Tables that the [kernel](super::kernel) reads, as 32-bit words.

use super::bands::{Band, Range};
use super::kernel::{ENTRY, HEADER, ZEROS};
use super::tuning::TASK_VECTORS;

/// Returns the table of one launch, for vectors of `lanes` lanes, and the number of its tasks.
///
/// Sources are numbered within the launch.
pub(super) fn table(bands: &[Band], range: &Range, lanes: usize) -> (Vec<u32>, usize) {
    let tasks = range.vectors.len().div_ceil(TASK_VECTORS);
    let first = |vector: usize| bands.partition_point(|band| band.start <= vector * lanes) - 1;
    let last = bands.partition_point(|band| band.start < range.vectors.end * lanes) - 1;
    let begin = first(range.vectors.start);
    let used = &bands[begin..=last];
    let starts = (0..tasks).map(|task| first(range.vectors.start + task * TASK_VECTORS) - begin);
    let bands_at = HEADER + tasks + 1;
    let columns_at = bands_at + ENTRY * used.len();

    let mut words = vec![range.vectors.start, range.vectors.end, bands_at, columns_at];
    words.extend(starts.chain([last - begin]));
    let mut columns = 0;
    for band in used {
        words.extend([band.start, band.stride, columns, band.columns.len()]);
        columns += band.columns.len();
    }
    let mut words: Vec<u32> = words.into_iter().map(word).collect();
    for column in used.iter().flat_map(|band| &band.columns) {
        // A band that extends into the next range may have sources that this range does not read.
        let local = column
            .source
            .and_then(|source| range.sources.binary_search(&source).ok());
        let source = local.map_or(ZEROS, word);
        words.extend([
            word(column.start),
            source,
            word(column.from),
            word(column.from_stride),
        ]);
    }
    (words, tasks)
}

fn word(value: usize) -> u32 {
    u32::try_from(value).expect("a plan counts in 32 bits")
}
