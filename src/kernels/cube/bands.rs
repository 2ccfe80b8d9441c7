//! [`Band`]: copies, described from the side of the target memory.

use std::collections::BTreeSet;

use itertools::Itertools;

use crate::kernels::{CopyPlan, StridedCopy};

/// Source of one range of lanes in every row of a [`Band`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Column {
    /// First lane in the row. The column ends where the next begins.
    pub start: usize,
    /// Index of the source; `None` writes zeros.
    pub source: Option<usize>,
    /// Lane of the source from which the first lane of the first row is read.
    pub from: usize,
    /// Distance between rows in the source.
    pub from_stride: usize,
}

/// Adjacent rows of equal length, each divided into the same columns.
///
/// ```text
/// start ->  a a a b b | a a a b b | a a a b b      stride 5, 3 rows, columns at 0 and 3
/// ```
///
/// All bands together cover the target memory, without gaps and without overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Band {
    /// First lane in the target memory.
    pub start: usize,
    /// Lanes of a row.
    pub stride: usize,
    pub rows: usize,
    pub columns: Vec<Column>,
}

impl Band {
    pub fn end(&self) -> usize {
        self.start + self.rows * self.stride
    }

    /// Returns the sources that the band reads.
    pub fn sources(&self) -> impl Iterator<Item = usize> + '_ {
        self.columns.iter().filter_map(|column| column.source)
    }

    fn zeros(start: usize, end: usize) -> Self {
        let columns = vec![Column {
            start: 0,
            source: None,
            from: 0,
            from_stride: 0,
        }];
        Self {
            start,
            stride: end - start,
            rows: 1,
            columns,
        }
    }

    /// Creates a band from segments whose equal rows are next to each other. The first of them
    /// begins at `start`.
    fn of(start: usize, segments: &[StridedCopy]) -> Self {
        let first = segments[0];
        let stride = if first.rows == 1 {
            first.run
        } else {
            first.to_stride
        };
        let mut columns: Vec<Column> = Vec::new();
        let mut end = 0;
        for segment in segments {
            let at = segment.to - first.to;
            if at > end {
                columns.push(Column {
                    start: end,
                    source: None,
                    from: 0,
                    from_stride: 0,
                });
            }
            let StridedCopy {
                source,
                from,
                from_stride,
                ..
            } = *segment;
            columns.push(Column {
                start: at,
                source: Some(source),
                from,
                from_stride,
            });
            end = at + segment.run;
        }
        if end < stride {
            columns.push(Column {
                start: end,
                source: None,
                from: 0,
                from_stride: 0,
            });
        }
        Self {
            start,
            stride,
            rows: first.rows,
            columns,
        }
    }
}

/// Returns the bands of `copies` over `total` lanes, in which target `i` begins at `offsets[i]`.
///
/// # Panics
/// If rows of segments interleave and are not of equal number and distance, as those of a layout
/// are.
pub(super) fn bands(copies: &CopyPlan, offsets: &[usize], total: usize) -> Vec<Band> {
    let segments = copies
        .segments
        .iter()
        .copied()
        .sorted_by_key(|segment| (offsets[segment.target], segment.to));
    let by_target = segments.chunk_by(|segment| segment.target);
    let mut bands: Vec<Band> = Vec::new();
    for (target, segments) in &by_target {
        side_by_side(&segments.collect_vec(), offsets[target], &mut bands);
    }
    let mut covered = Vec::with_capacity(2 * bands.len() + 1);
    let mut end = 0;
    for band in bands {
        assert!(
            band.start >= end,
            "rows interleave only with rows of equal number and distance"
        );
        if band.start > end {
            covered.push(Band::zeros(end, band.start));
        }
        end = band.end();
        covered.push(band);
    }
    assert!(end <= total, "rows end inside their target");
    if end < total {
        covered.push(Band::zeros(end, total));
    }
    covered
}

/// Appends the segments of one target, which begins at `offset`, as bands.
fn side_by_side(segments: &[StridedCopy], offset: usize, bands: &mut Vec<Band>) {
    let mut rest = segments;
    while let Some(first) = rest.first() {
        let row = first.to + first.to_stride;
        let other = |segment: &StridedCopy| {
            segment.rows == first.rows
                && segment.to_stride == first.to_stride
                && segment.to + segment.run <= row
        };
        let count = match first.rows {
            1 => 1,
            _ => rest.iter().take_while(|segment| other(segment)).count(),
        };
        let (together, after) = rest.split_at(count);
        bands.push(Band::of(offset + first.to, together));
        rest = after;
    }
}

/// Part of the target memory that one launch writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Range {
    /// Range in vectors of the target memory.
    pub vectors: std::ops::Range<usize>,
    /// Sources that are read, in ascending order.
    pub sources: Vec<usize>,
}

/// Divides the bands into the fewest ranges of complete vectors of `lanes` lanes that read at most
/// `limit` sources each. A range ends at the vector in which a band begins.
///
/// # Errors
/// The number of sources in one vector or band, if it is more than `limit`.
pub(super) fn ranges(bands: &[Band], lanes: usize, limit: usize) -> Result<Vec<Range>, usize> {
    let mut ranges = Vec::new();
    let mut begin = 0;
    let end = bands.last().map_or(0, |band| band.end().div_ceil(lanes));
    while begin < end {
        let rest = &bands[bands.partition_point(|band| band.end() <= begin * lanes)..];
        let mut stop = end;
        let mut read = BTreeSet::new();
        for band in rest {
            read.extend(band.sources());
            if read.len() > limit {
                stop = band.start / lanes;
                break;
            }
        }
        if stop <= begin {
            return Err(read.len());
        }
        let inside = rest.iter().take_while(|band| band.start < stop * lanes);
        let sources = inside
            .flat_map(Band::sources)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        ranges.push(Range {
            vectors: begin..stop,
            sources,
        });
        begin = stop;
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Shape;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    #[test]
    fn interleaved_parts_are_one_band_and_gaps_are_zeros() {
        let part = |source, to, run| StridedCopy {
            source,
            target: 0,
            from: 0,
            to,
            rows: 3,
            run,
            from_stride: run,
            to_stride: 5,
        };
        let copies = CopyPlan::new(
            vec![Shape::new([9]), Shape::new([6])],
            vec![Shape::new([3, 5]), Shape::new([2])],
            vec![
                part(1, 3, 2),
                part(0, 0, 3),
                StridedCopy::run(0, 1, 4, 0, 2),
            ],
        );
        let column = |start, source, from, from_stride| Column {
            start,
            source,
            from,
            from_stride,
        };
        let first = Band {
            start: 0,
            stride: 5,
            rows: 3,
            columns: vec![column(0, Some(0), 0, 3), column(3, Some(1), 0, 2)],
        };
        let second = Band {
            start: 16,
            stride: 2,
            rows: 1,
            columns: vec![column(0, Some(0), 4, 2)],
        };
        assert_eq!(
            bands(&copies, &[0, 16], 20),
            [first, Band::zeros(15, 16), second, Band::zeros(18, 20)]
        );
    }

    /// Returns the minimum number of ranges, by trying every end.
    fn fewest(bands: &[Band], lanes: usize, limit: usize) -> Option<usize> {
        let vectors = bands.last().map_or(0, |band| band.end().div_ceil(lanes));
        let mut best = vec![Some(0)];
        for end in 1..=vectors {
            let from = |begin: usize| {
                let inside = bands
                    .iter()
                    .filter(|band| band.start < end * lanes && band.end() > begin * lanes);
                let read = inside.flat_map(Band::sources).unique().count();
                (read <= limit).then_some(best[begin]? + 1)
            };
            best.push((0..end).filter_map(from).min());
        }
        best[vectors]
    }

    #[test]
    fn ranges_are_the_fewest_that_bindings_allow() {
        let mut rng = StdRng::seed_from_u64(7);
        let mut errors = 0;
        for _ in 0..300 {
            let mut end = 0;
            let band = |source: usize| {
                let band = Band::of(
                    end,
                    &[StridedCopy::run(source, 0, 0, 0, rng.random_range(1..9))],
                );
                end = band.end();
                band
            };
            let all = (0..9).map(band).collect_vec();
            let lanes = rng.random_range(1..5);
            let limit = rng.random_range(1..5);
            let found = ranges(&all, lanes, limit).ok();
            errors += usize::from(found.is_none());
            assert_eq!(
                found.as_ref().map(Vec::len),
                fewest(&all, lanes, limit),
                "{lanes} {limit} {all:?}"
            );
            for range in found.into_iter().flatten() {
                let read = all
                    .iter()
                    .filter(|band| {
                        band.start < range.vectors.end * lanes
                            && band.end() > range.vectors.start * lanes
                    })
                    .flat_map(Band::sources)
                    .collect_vec();
                assert_eq!(range.sources, read);
            }
        }
        assert!(
            (10..150).contains(&errors),
            "{errors} of 300 have a vector of too many sources"
        );
    }
}
