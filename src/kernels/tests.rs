//! Tests of plans against index arithmetic on single elements.

use burn::tensor::Shape;
use itertools::Itertools;

use super::{CopyPlan, FlatLayout, ShardedTensorSpec, StridedCopy};
use crate::placement::ShardSizes;

/// Executes `copies` and returns every target by element; `None` for an element that was not
/// written.
pub(super) fn run<T: Clone>(copies: &CopyPlan, sources: &[Vec<T>]) -> Vec<Vec<Option<T>>> {
    let lens = |shapes: &[Shape]| shapes.iter().map(Shape::num_elements).collect_vec();
    assert_eq!(
        lens(&copies.sources),
        sources.iter().map(Vec::len).collect_vec()
    );
    let mut targets = lens(&copies.targets)
        .into_iter()
        .map(|len| vec![None; len])
        .collect_vec();
    for segment in &copies.segments {
        for (row, column) in (0..segment.rows).cartesian_product(0..segment.run) {
            let from = &sources[segment.source][segment.from + row * segment.from_stride + column];
            let to = &mut targets[segment.target][segment.to + row * segment.to_stride + column];
            assert!(to.is_none(), "written twice: {segment:?}");
            *to = Some(from.clone());
        }
    }
    targets
}

/// Name of an element: its tensor, and its position in the full tensor.
type Name = (usize, usize);

fn full(index: usize, tensor: &ShardedTensorSpec) -> Vec<Name> {
    (0..tensor.shape.num_elements())
        .map(|at| (index, at))
        .collect()
}

/// Returns the shard of `rank`, element by element.
fn part(index: usize, tensor: &ShardedTensorSpec, ranks: usize, rank: usize) -> Vec<Name> {
    let range = tensor.sizes.range(ranks, rank);
    let inner: usize = tensor.shape[tensor.dim + 1..].iter().product();
    full(index, tensor)
        .into_iter()
        .filter(|(_, at)| range.contains(&(at / inner.max(1) % tensor.shape[tensor.dim].max(1))))
        .collect()
}

fn layouts() -> impl Iterator<Item = (usize, Vec<ShardedTensorSpec>, usize)> {
    let tensor = |shape: &[usize], dim: usize, uneven: Option<&[usize]>| {
        let sizes = uneven.map_or(ShardSizes::Chunked(shape[dim]), |lengths| {
            ShardSizes::Uneven(lengths.into())
        });
        ShardedTensorSpec {
            shape: Shape::from(shape.to_vec()),
            dim,
            sizes,
        }
    };
    let lists = [1, 2, 3, 4].map(|ranks| {
        let uneven = |total: usize| {
            let mut lengths = vec![0; ranks];
            (lengths[ranks - 1], lengths[0]) = (total - total / 3, lengths[0] + total / 3);
            if ranks == 1 {
                lengths[0] = total;
            }
            lengths
        };
        let shapes: [&[usize]; 7] = [
            &[1],
            &[7],
            &[4, 3],
            &[5, 1, 3],
            &[2, 6, 2],
            &[0, 3],
            &[3, 0],
        ];
        let all = shapes.iter().flat_map(|shape| {
            (0..shape.len()).flat_map(move |dim| {
                [
                    tensor(shape, dim, None),
                    tensor(shape, dim, Some(&uneven(shape[dim]))),
                ]
            })
        });
        (ranks, all.collect_vec())
    });
    lists.into_iter().flat_map(|(ranks, all)| {
        let alone = all.iter().map(|tensor| vec![tensor.clone()]).collect_vec();
        alone
            .into_iter()
            .chain([all, Vec::new()])
            .cartesian_product([1, 4])
            .map(move |(list, align)| (ranks, list, align))
    })
}

#[test]
fn shards_go_through_rows_to_full_tensors_and_back() {
    for (ranks, tensors, align) in layouts() {
        let layout = FlatLayout::new(ranks, tensors.clone(), align);
        let full_tensors = tensors
            .iter()
            .enumerate()
            .map(|(index, tensor)| full(index, tensor))
            .collect_vec();
        let parts = |rank| {
            tensors
                .iter()
                .enumerate()
                .map(move |(i, tensor)| (i, tensor, rank))
        };
        let parts = |rank| {
            parts(rank)
                .map(|(i, tensor, rank)| part(i, tensor, ranks, rank))
                .collect_vec()
        };
        let filled = |names: &[Name]| names.iter().copied().map(Some).collect_vec();
        let expected = full_tensors.iter().map(|names| filled(names)).collect_vec();

        let rows = (0..ranks)
            .map(|rank| run(&layout.pack_parts(rank), &parts(rank)).remove(0))
            .collect_vec();
        let gathered = rows
            .iter()
            .map(|row| {
                row.iter()
                    .map(|name| name.unwrap_or((99, 99)))
                    .collect_vec()
            })
            .collect_vec();
        let copied = run(&layout.pack_full(), &full_tensors).remove(0);
        assert_eq!(copied, rows.concat(), "{layout:?}");
        assert_eq!(
            run(&layout.unpack_rows(), &gathered),
            expected,
            "{layout:?}"
        );
        assert_eq!(
            run(&layout.unpack_full(), &[gathered.concat()]),
            expected,
            "{layout:?}"
        );
        let all = (0..ranks).flat_map(parts).collect_vec();
        assert_eq!(run(&layout.join_parts(), &all), expected, "{layout:?}");
        for rank in 0..ranks {
            let back = run(&layout.unpack_parts(rank), &gathered[rank..=rank]);
            assert_eq!(
                back,
                parts(rank).iter().map(|names| filled(names)).collect_vec(),
                "{layout:?}"
            );
        }
        let padding = rows.iter().flatten().filter(|name| name.is_none()).count();
        assert_eq!(layout.padding(), padding, "{layout:?}");
        assert_eq!(layout.pack_full().copied() + padding, ranks * layout.row());
    }
}

#[test]
fn even_shards_of_dimension_0_are_one_run_a_rank() {
    let tensor = ShardedTensorSpec {
        shape: Shape::new([4, 3]),
        dim: 0,
        sizes: ShardSizes::Chunked(4),
    };
    let copies = FlatLayout::new(2, vec![tensor], 1).unpack_full();
    assert_eq!(
        copies
            .segments
            .iter()
            .map(|segment| (segment.rows, segment.run))
            .collect_vec(),
        [(1, 6), (1, 6)]
    );
}

#[test]
fn blocks_are_concatenated_along_any_dimension() {
    let shapes = [
        vec![5],
        vec![2, 3],
        vec![3, 1, 2],
        vec![3, 4, 2],
        vec![2, 3, 3, 2],
    ];
    for (shape, seed) in shapes.iter().cartesian_product(0..40_usize) {
        for dim in 0..shape.len() {
            // Blocks of the same shape except along `dim`, with random bounds.
            let sizes = |at: usize, mix: usize| {
                let len = shape[at];
                let start = (seed * 7 + mix) % (len + 1);
                start..start + (seed * 3 + mix / 2) % (len + 1 - start)
            };
            let common = (0..shape.len()).map(|at| sizes(at, at * 5)).collect_vec();
            let ranges = (0..3).map(|source| {
                let mut ranges = common.clone();
                ranges[dim] = sizes(dim, source * 11 + 1);
                ranges
            });
            let ranges = ranges.collect_vec();
            let shape = Shape::from(shape.clone());
            let blocks = ranges
                .iter()
                .map(|ranges| (shape.clone(), &ranges[..]))
                .collect_vec();

            let sources = (0..3).map(|source| {
                (0..shape.num_elements())
                    .map(|at| (source, at))
                    .collect_vec()
            });
            let sources: Vec<Vec<Name>> = sources.collect();
            let copied = run(&CopyPlan::concat(&blocks, dim), &sources).remove(0);

            let outer = common[..dim]
                .iter()
                .cloned()
                .multi_cartesian_product()
                .collect_vec();
            let flat = |index: &[usize]| {
                index
                    .iter()
                    .zip(&shape[..])
                    .fold(0, |at, (index, len)| at * len + index)
            };
            let expected = outer.iter().flat_map(|outer| {
                let block = |(source, ranges): (usize, &Vec<std::ops::Range<usize>>)| {
                    let inner = ranges[dim..].iter().cloned().multi_cartesian_product();
                    inner
                        .map(move |inner| Some((source, flat(&[&outer[..], &inner].concat()))))
                        .collect_vec()
                };
                ranges.iter().enumerate().flat_map(block).collect_vec()
            });
            assert_eq!(copied, expected.collect_vec(), "{ranges:?} along {dim}");
        }
    }
}

#[test]
fn what_no_segment_writes_is_a_gap() {
    let targets = vec![Shape::new([3, 4]), Shape::new([2]), Shape::new([0])];
    let block = StridedCopy {
        source: 0,
        target: 0,
        from: 0,
        to: 1,
        rows: 3,
        run: 2,
        from_stride: 2,
        to_stride: 4,
    };
    let copies = CopyPlan::new(vec![Shape::new([6])], targets, vec![block]);
    let gaps = copies
        .gaps
        .iter()
        .map(|gap| (gap.target, gap.at, gap.len))
        .collect_vec();
    assert_eq!(
        gaps,
        [(0, 0, 1), (0, 3, 2), (0, 7, 2), (0, 11, 1), (1, 0, 2)]
    );
}

#[test]
#[should_panic(expected = "element 2 of target 0 is written twice")]
fn two_segments_that_write_one_element_are_refused() {
    let segments = [(0, 3), (2, 2)].map(|(to, len)| StridedCopy::run(0, 0, 0, to, len));
    CopyPlan::new(
        vec![Shape::new([3])],
        vec![Shape::new([8])],
        segments.to_vec(),
    );
}

#[test]
#[should_panic(expected = "leaves its source or its target")]
fn a_segment_beyond_its_source_is_refused() {
    let block = StridedCopy {
        source: 0,
        target: 0,
        from: 0,
        to: 0,
        rows: 2,
        run: 2,
        from_stride: 3,
        to_stride: 2,
    };
    CopyPlan::new(vec![Shape::new([4])], vec![Shape::new([4])], vec![block]);
}
