//! Divides segments among the rank's threads.

use std::ops::Range;

use rayon::prelude::*;
use smallvec::{SmallVec, smallvec};

use crate::kernels::StridedCopy;
use crate::memory::HostTuning;

/// Calls `work` with all elements of `segments`, each once, in the order of the segments.
///
/// The elements are divided into tasks of nearly equal length: a task has several small segments,
/// and a large segment is split. On one thread, or for small copies, the caller does all the work.
pub(super) fn each(segments: &[StridedCopy], size: usize, work: impl Fn(&[StridedCopy]) + Sync) {
    let threads = rayon::current_num_threads();
    let total = if threads > 1 {
        segments.iter().map(StridedCopy::len).sum()
    } else {
        0
    };
    let HostTuning {
        tasks_per_worker,
        task_bytes,
        ..
    } = *HostTuning::get();
    let count = (threads * tasks_per_worker).min(total * size / task_bytes);
    if count < 2 {
        return work(segments);
    }
    let points = split_points(segments, total, count);
    points.par_windows(2).with_max_len(1).for_each(|points| {
        for_range(segments, points[0], points[1], &work);
    });
}

/// Position between two elements: index of the segment, and number of its elements before the
/// position.
pub(super) type SplitPoint = (usize, usize);

/// Returns the starts of `count` tasks of segments with `total` elements, followed by the end of
/// the last task.
pub(super) fn split_points(
    segments: &[StridedCopy],
    total: usize,
    count: usize,
) -> Vec<SplitPoint> {
    let mut index = 0;
    let mut before = 0;
    let inner = (1..count).map(|task| {
        let at = (total as u128 * task as u128 / count as u128) as usize;
        while before + segments[index].len() <= at {
            before += segments[index].len();
            index += 1;
        }
        let element = at - before;
        let run = segments[index].run;
        let column = element % run;
        (
            index,
            element
                - if run < HostTuning::SPLIT_RUN {
                    column
                } else {
                    column % HostTuning::SPLIT
                },
        )
    });
    [(0, 0)]
        .into_iter()
        .chain(inner)
        .chain([(segments.len(), 0)])
        .collect()
}

/// Calls `work` with the segments between two positions.
pub(super) fn for_range(
    segments: &[StridedCopy],
    from: SplitPoint,
    to: SplitPoint,
    mut work: impl FnMut(&[StridedCopy]),
) {
    if from.0 == to.0 {
        return work(&part(segments[from.0], from.1..to.1));
    }
    if from.1 > 0 {
        let segment = segments[from.0];
        work(&part(segment, from.1..segment.len()));
    }
    work(&segments[from.0 + (from.1 > 0) as usize..to.0]);
    if to.1 > 0 {
        work(&part(segments[to.0], 0..to.1));
    }
}

/// Returns elements `range` of a segment: the end of one run, some complete runs, and the start of
/// another.
fn part(segment: StridedCopy, range: Range<usize>) -> SmallVec<[StridedCopy; 3]> {
    let StridedCopy {
        run,
        from_stride,
        to_stride,
        ..
    } = segment;
    let rows = |row: usize, column: usize, rows: usize, run: usize| {
        let from = segment.from + row * from_stride + column;
        let to = segment.to + row * to_stride + column;
        StridedCopy {
            from,
            to,
            rows,
            run,
            ..segment
        }
    };
    let Range { start, end } = range;
    let first = start.div_ceil(run);
    let last = end / run;
    let mut parts: SmallVec<[StridedCopy; 3]> = if first > last {
        smallvec![rows(last, start % run, 1, end - start)]
    } else {
        let head = rows(start / run, start % run, 1, first * run - start);
        smallvec![
            head,
            rows(first, 0, last - first, run),
            rows(last, 0, 1, end % run)
        ]
    };
    parts.retain(|part| part.len() > 0);
    parts
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns the elements that a segment copies, as pairs of source and target.
    fn written(segment: StridedCopy) -> Vec<(usize, usize)> {
        let StridedCopy {
            from,
            to,
            rows,
            run,
            from_stride,
            to_stride,
            ..
        } = segment;
        (0..rows)
            .flat_map(|row| {
                (0..run).map(move |column| {
                    (
                        from + row * from_stride + column,
                        to + row * to_stride + column,
                    )
                })
            })
            .collect()
    }

    #[test]
    fn a_part_has_the_elements_of_its_range() {
        for (rows, run) in [(1, 7), (3, 1), (4, 3), (2, 5)] {
            let segment = StridedCopy {
                source: 0,
                target: 0,
                from: 2,
                to: 1,
                rows,
                run,
                from_stride: 9,
                to_stride: 8,
            };
            let all = written(segment);
            for start in 0..=all.len() {
                for end in start..=all.len() {
                    let parts: Vec<_> = part(segment, start..end)
                        .into_iter()
                        .flat_map(written)
                        .collect();
                    assert_eq!(parts, all[start..end], "{rows} x {run}, {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn tasks_have_every_element_once() {
        let segment = |to, rows, run| StridedCopy {
            source: 0,
            target: 0,
            from: 0,
            to,
            rows,
            run,
            from_stride: run,
            to_stride: run,
        };
        let lists = [
            vec![segment(0, 1, 100_000)],
            vec![
                segment(0, 3000, 7),
                segment(21_000, 2, 2000),
                segment(25_000, 1, 1),
            ],
            (0..500).map(|index| segment(index * 10, 5, 2)).collect(),
        ];
        for segments in lists {
            let total = segments.iter().map(StridedCopy::len).sum();
            for count in [2, 3, 8, 13] {
                let points = split_points(&segments, total, count);
                let mut seen = Vec::new();
                let mut longest = 0;
                for points in points.windows(2) {
                    let before = seen.len();
                    for_range(&segments, points[0], points[1], |part| {
                        seen.extend(
                            part.iter()
                                .flat_map(|segment| written(*segment))
                                .map(|at| at.1),
                        )
                    });
                    longest = longest.max(seen.len() - before);
                }
                assert_eq!(seen.len(), total);
                assert_eq!(
                    seen.iter().collect::<BTreeSet<_>>().len(),
                    total,
                    "no element occurs twice"
                );
                assert!(
                    longest <= total / count + HostTuning::SPLIT_RUN,
                    "{longest} of {total} in one of {count}"
                );
            }
        }
    }
}
