//! Layouts: their construction, arithmetic, text and errors.

use std::ops::Range;

use itertools::Itertools;

use super::{Layout, PartialOp, Placement, PlacementError, StridedLayout, StridedPlacement};
use Placement::{Partial, Replicate, Shard};

#[test]
fn the_first_mesh_dimension_is_outermost() {
    // The example in the doc of `Layout`, written out.
    let held = |order: &[usize]| {
        let layout =
            Layout::with_shard_order(&[2, 2], &[Shard(0), Shard(0)], &[(0, order)]).unwrap();
        [[0, 0], [0, 1], [1, 0], [1, 1]]
            .map(|coordinate| layout.local_slices(&[8], &coordinate)[0].clone())
    };
    assert_eq!(held(&[0, 1]), [0..2, 2..4, 4..6, 6..8]);
    assert_eq!(held(&[1, 0]), [0..2, 4..6, 2..4, 6..8]);
}

#[test]
fn a_block_is_what_the_dimensions_before_left() {
    // 7 rows: mesh dim 2 splits them into 4 + 3, then mesh dim 0 into 2 + 2 and 2 + 1.
    let layout =
        Layout::with_shard_order(&[2, 3, 2], &[Shard(0), Shard(1), Shard(0)], &[(0, &[2, 0])])
            .unwrap();
    assert_eq!(layout.shard_order(0), [2, 0]);
    assert_eq!(layout.shard_order(1), [1]);
    assert!(layout.shard_order(2).is_empty());
    for (coordinate, shape, slices, parent) in [
        ([0, 0, 0], [2, 2], [0..2, 0..2], 4),
        ([1, 1, 0], [2, 2], [2..4, 2..4], 4),
        ([0, 2, 1], [2, 0], [4..6, 4..4], 3),
        ([1, 0, 1], [1, 2], [6..7, 0..2], 3),
    ] {
        assert_eq!(layout.local_shape(&[7, 4], &coordinate), shape);
        assert_eq!(layout.local_slices(&[7, 4], &coordinate), slices);
        let parents =
            [0, 1, 2].map(|mesh_dim| layout.shard_sizes(&[7, 4], &coordinate, mesh_dim).total());
        assert_eq!(parents, [parent, 4, 7], "{coordinate:?}");
    }
}

#[test]
fn shards_partition_the_tensor() {
    // Each element of each dimension is held once per rank of the other mesh dimensions.
    for (len, mesh) in (0..14).cartesian_product([[2, 2], [3, 2], [2, 4]]) {
        for order in [[0, 1], [1, 0]] {
            let layout =
                Layout::with_shard_order(&mesh, &[Shard(0), Shard(0)], &[(0, &order)]).unwrap();
            let coordinates = mesh.iter().map(|&size| 0..size).multi_cartesian_product();
            let held = coordinates
                .flat_map(|coordinate| layout.local_slices(&[len], &coordinate)[0].clone());
            assert_eq!(
                held.sorted().collect_vec(),
                (0..len).collect_vec(),
                "{layout} on {mesh:?}"
            );
        }
    }
}

/// The result is compared with the shards of all ranks, on meshes up to 4 x 4 x 2 and with every
/// shard order.
#[test]
fn the_shortest_part_is_that_of_some_rank_and_no_rank_has_a_shorter_one() {
    let sizes = [1..=4, 1..=4, 1..=2];
    let mut not_the_last = 0;
    for mesh in sizes.into_iter().multi_cartesian_product() {
        let placements = (0..3)
            .map(|_| [Replicate, Shard(0), Shard(1)])
            .multi_cartesian_product();
        for (placements, mesh_order) in placements.cartesian_product((0..3).permutations(3)) {
            let layout = Layout::in_order(&mesh, &placements, &mesh_order).unwrap();
            let coordinates = mesh
                .iter()
                .map(|&size| 0..size)
                .multi_cartesian_product()
                .collect_vec();
            for len in 0..=40 {
                let parts = coordinates
                    .iter()
                    .map(|coordinate| layout.local_shape(&[len, 40 - len], coordinate));
                let parts = parts.collect_vec();
                let least = [0, 1].map(|dim| parts.iter().map(|part| part[dim]).min().unwrap());
                assert_eq!(
                    layout.min_local_shape(&[len, 40 - len]),
                    least,
                    "{layout} on {mesh:?}, {len}"
                );
                not_the_last += usize::from(*parts.last().unwrap() != least);
            }
        }
    }
    assert!(not_the_last > 0);
}

/// Layouts of one tensor dimension on a mesh (2, 3), in both orders and with various sizes on
/// either mesh dimension, are compared with rows assigned one by one.
#[test]
fn uneven_sizes_divide_what_the_dimensions_before_left() {
    let two = (0..=6).map(|len| Some(vec![len, 6 - len])).chain([
        None,
        Some(vec![2, 0]),
        Some(vec![1, 1]),
    ]);
    let three: [Option<Vec<usize>>; 5] = [
        None,
        Some(vec![4, 0, 2]),
        Some(vec![0, 0, 6]),
        Some(vec![0, 3, 0]),
        Some(vec![1, 1, 1]),
    ];
    let deal =
        |rows: &[usize], lengths: Option<&Vec<usize>>, ranks: usize| -> Option<Vec<Vec<usize>>> {
            let mut rows = rows.iter().copied();
            let full = rows.len().div_ceil(ranks);
            let parts = (0..ranks).map(|rank| {
                rows.by_ref()
                    .take(lengths.map_or(full, |lengths| lengths[rank]))
                    .collect()
            });
            let parts: Vec<Vec<usize>> = parts.collect();
            let exact = lengths
                .is_none_or(|lengths| parts.iter().map(Vec::len).eq(lengths.iter().copied()));
            (exact && rows.next().is_none()).then_some(parts)
        };
    let mut fitting = 0;
    for ((first, second), order) in two
        .cartesian_product(three)
        .cartesian_product([[0, 1], [1, 0]])
    {
        let given = [first.as_ref(), second.as_ref()];
        let plain =
            Layout::with_shard_order(&[2, 3], &[Shard(0), Shard(0)], &[(0, &order)]).unwrap();
        let layout = [0, 1]
            .into_iter()
            .fold(plain, |layout, mesh_dim| match given[mesh_dim] {
                Some(lengths) => layout.with_uneven_sizes(mesh_dim, lengths.clone()).unwrap(),
                None => layout,
            });
        let outer = deal(&[0, 1, 2, 3, 4, 5], given[order[0]], [2, 3][order[0]]);
        let inner = |block: &Vec<usize>| deal(block, given[order[1]], [2, 3][order[1]]);
        let dealt: Option<Vec<Vec<Vec<usize>>>> =
            outer.and_then(|outer| outer.iter().map(inner).collect());
        assert_eq!(
            layout.check_shape(&[6]).is_ok(),
            dealt.is_some(),
            "{layout}"
        );
        let Some(dealt) = dealt else { continue };
        fitting += 1;
        for (outer, inner) in (0..[2, 3][order[0]]).cartesian_product(0..[2, 3][order[1]]) {
            let mut coordinate = [outer; 2];
            coordinate[order[1]] = inner;
            let held = layout.local_slices(&[6], &coordinate)[0]
                .clone()
                .collect_vec();
            assert_eq!(held, dealt[outer][inner], "{layout} at {coordinate:?}");
        }
        let shortest = dealt.iter().flatten().map(Vec::len).min();
        assert_eq!(
            layout.min_local_shape(&[6]).first().copied(),
            shortest,
            "{layout}"
        );
    }
    // If the first mesh dimension is outermost: 8, and 4 in which its intervals of 3 rows have
    // explicit sizes too. If the second is outermost: 3 and 2.
    assert_eq!(fitting, 17);
}

#[test]
fn lengths_are_part_of_a_layout() {
    let plain = Layout::new(&[2, 3], &[Shard(1), Shard(0)]).unwrap();
    let uneven = plain.clone().with_uneven_sizes(1, [3, 0, 2]).unwrap();
    assert_ne!(plain, uneven);
    assert_ne!(
        uneven,
        plain.clone().with_uneven_sizes(1, [2, 0, 3]).unwrap()
    );
    let both = uneven.clone().with_uneven_sizes(0, [1, 6]).unwrap();
    assert_eq!(
        both,
        plain
            .with_uneven_sizes(0, [1, 6])
            .unwrap()
            .with_uneven_sizes(1, [3, 0, 2])
            .unwrap()
    );
    assert_eq!(
        both.to_string(),
        "[S(1), S(0); mesh dim 0 sizes 1 + 6; mesh dim 1 sizes 3 + 0 + 2]"
    );
    assert!(both.has_default_order() && !both.has_default_shard_sizes());
    assert_eq!(
        both.shard_sizes(&[5, 7], &[0, 0], 1).lengths().unwrap()[..],
        [3, 0, 2]
    );
    // Uneven sizes are removed together with their shard, and with a shard outside it.
    let without = |gone: usize| {
        both.replaced(|dim, own| if dim == gone { Replicate } else { own })
            .unwrap()
    };
    assert_eq!(
        without(0).to_string(),
        "[R, S(0); mesh dim 1 sizes 3 + 0 + 2]"
    );
    assert_eq!(without(1).to_string(), "[S(1), R; mesh dim 0 sizes 1 + 6]");
    let nested = Layout::new(&[2, 3], &[Shard(0), Shard(0)])
        .unwrap()
        .with_uneven_sizes(1, [3, 0, 2])
        .unwrap();
    assert_eq!(
        nested
            .replaced(|dim, own| if dim == 0 { Replicate } else { own })
            .unwrap()
            .to_string(),
        "[R, S(0)]"
    );
}

#[test]
fn layouts_are_told_apart_by_their_order() {
    let layout = |order: &[usize]| {
        Layout::with_shard_order(&[2, 2], &[Shard(1), Shard(1)], &[(1, order)]).unwrap()
    };
    assert_eq!(
        layout(&[0, 1]),
        Layout::new(&[2, 2], &[Shard(1), Shard(1)]).unwrap()
    );
    assert_ne!(layout(&[0, 1]), layout(&[1, 0]));
    assert_eq!(layout(&[0, 1]).to_string(), "[S(1), S(1)]");
    assert_eq!(
        layout(&[1, 0]).to_string(),
        "[S(1), S(1); dim 1 sharded by mesh dims 1, 0]"
    );
    assert!(layout(&[0, 1]).has_default_order() && !layout(&[1, 0]).has_default_order());
    assert!(
        Layout::new(&[2], &[Partial(PartialOp::Avg)])
            .unwrap()
            .has_partial()
    );
}

#[test]
fn bad_layouts_are_refused_with_their_remedy() {
    let refused =
        |result: Result<Layout, PlacementError>, expected: PlacementError, remedy: &str| {
            let error = result.unwrap_err();
            assert_eq!(error, expected);
            assert!(error.to_string().contains(remedy), "{error}");
        };
    refused(
        Layout::new(&[2, 2], &[Replicate]),
        PlacementError::Count {
            placements: 1,
            mesh_dims: 2,
            mesh_shape: vec![2, 2],
        },
        "one placement per mesh dimension",
    );
    refused(
        Layout::new(&[2, 0], &[Replicate, Replicate]),
        PlacementError::EmptyMesh {
            mesh_dim: 1,
            mesh_shape: vec![2, 0],
        },
        "at least one rank",
    );
    let two = [Shard(0), Shard(0)];
    for given in [&[0][..], &[0, 0], &[0, 1, 1], &[0, 2]] {
        let expected = PlacementError::Order {
            dim: 0,
            given: given.to_vec(),
            expected: vec![0, 1],
        };
        refused(
            Layout::with_shard_order(&[2, 2], &two, &[(0, given)]),
            expected,
            "exactly once, outermost first",
        );
    }
    refused(
        Layout::with_shard_order(&[2, 2], &two, &[(1, &[0])]),
        PlacementError::Order {
            dim: 1,
            given: vec![0],
            expected: vec![],
        },
        "mesh dimensions []",
    );
    refused(
        Layout::with_shard_order(&[2, 2], &two, &[(0, &[1, 0]), (0, &[0, 1])]),
        PlacementError::OrderTwice { dim: 0 },
        "one order per tensor dimension",
    );
    refused(
        Layout::new(
            &[2, 2, 2],
            &[Partial(PartialOp::Max), Shard(0), Partial(PartialOp::Sum)],
        ),
        PlacementError::MixedPartial {
            mesh_dim: 0,
            op: PartialOp::Max,
            other_mesh_dim: 2,
            other: PartialOp::Sum,
        },
        "Redistribute one of them to Replicate",
    );
    let one = |placement| Layout::new(&[2], &[placement]).unwrap();
    refused(
        one(Replicate).with_uneven_sizes(0, [1, 2]),
        PlacementError::MeshDimNotSharded {
            mesh_dim: 0,
            placement: Replicate,
            lengths: vec![1, 2],
        },
        "only a shard has sizes",
    );
    refused(
        one(Shard(1)).with_uneven_sizes(0, [1, 2, 3]),
        PlacementError::ShardSizeCount {
            mesh_dim: 0,
            ranks: 2,
            lengths: vec![1, 2, 3],
        },
        "3 shard sizes [1, 2, 3] for the 2 ranks of mesh dimension 0. Give one size per rank",
    );
    let checked = |layout: Layout, shape: &[usize]| layout.check_shape(shape).map(|()| layout);
    refused(
        checked(one(Shard(1)).with_uneven_sizes(0, [1, 2]).unwrap(), &[3, 4]),
        PlacementError::ShardSizeSum {
            mesh_dim: 0,
            dim: 1,
            lengths: vec![1, 2],
            len: 4,
        },
        "add up to 3, but they split a length of 4 of tensor dimension 1",
    );
    refused(
        checked(
            Layout::new(&[2, 2], &two)
                .unwrap()
                .with_uneven_sizes(1, [1, 2])
                .unwrap(),
            &[5],
        ),
        PlacementError::ShardSizeSum {
            mesh_dim: 1,
            dim: 0,
            lengths: vec![1, 2],
            len: 2,
        },
        "on every rank",
    );
    let error = Layout::new(&[2, 2], &[Replicate, Shard(2)])
        .unwrap()
        .check(2)
        .unwrap_err();
    assert_eq!(
        error,
        PlacementError::DimOutOfRange {
            mesh_dim: 1,
            dim: 2,
            ndim: 2
        }
    );
    assert!(
        error
            .to_string()
            .contains("S(2) on mesh dimension 1 does not fit a tensor of 2 dimensions"),
        "{error}"
    );
}

#[test]
fn sums_and_averages_go_together() {
    for ops in [
        [PartialOp::Sum, PartialOp::Avg],
        [PartialOp::Avg, PartialOp::Sum],
        [PartialOp::Max, PartialOp::Max],
    ] {
        assert!(Layout::new(&[2, 2], &ops.map(Partial)).is_ok(), "{ops:?}");
    }
}

#[test]
#[should_panic(expected = "[S(2)] shards dim 2, which a tensor of shape [4, 4] lacks")]
fn a_tensor_without_the_sharded_dim_panics() {
    Layout::new(&[2], &[Shard(2)])
        .unwrap()
        .local_slices(&[4, 4], &[0]);
}

#[test]
#[should_panic(expected = "mesh dimension 0 of [R] does not shard")]
fn a_mesh_dim_that_shards_nothing_has_no_block() {
    Layout::new(&[2], &[Replicate])
        .unwrap()
        .shard_sizes(&[4], &[0], 0);
}

/// Returns the split factors of a shard order by PyTorch's rule: the split factor of a shard is the
/// product of the mesh dimensions to its right that shard the same dimension outside it.
fn split_factors(mesh: &[usize], order: &[usize]) -> Vec<usize> {
    let place = |mesh_dim| {
        order
            .iter()
            .position(|&sharding_dim| sharding_dim == mesh_dim)
    };
    let before = |m| (m + 1..mesh.len()).filter(move |&right| place(right) < place(m));
    (0..mesh.len())
        .map(|m| before(m).map(|right| mesh[right]).product())
        .collect()
}

fn strided(factors: &[usize]) -> Vec<StridedPlacement> {
    let placement = |&split_factor: &usize| match split_factor {
        1 => Shard(0).into(),
        split_factor => StridedPlacement::Strided {
            dim: 0,
            split_factor,
        },
    };
    factors.iter().map(placement).collect()
}

#[test]
fn an_order_is_decoded_exactly_where_there_is_one() {
    for mesh in [&[2, 2][..], &[2, 3], &[3, 2, 2], &[2, 3, 4], &[2, 2, 2, 2]] {
        let orders = (0..mesh.len()).permutations(mesh.len()).collect_vec();
        let factors = mesh
            .iter()
            .map(|_| [1, 2, 3, 4, 6, 8, 12])
            .multi_cartesian_product();
        let mut decoded = 0;
        for factors in factors {
            let order = orders
                .iter()
                .find(|order| split_factors(mesh, order) == factors);
            let layout = Layout::from_strided(mesh, &strided(&factors));
            assert_eq!(layout.is_ok(), order.is_some(), "{factors:?} on {mesh:?}");
            if let Some(order) = order {
                let layout = layout.unwrap();
                assert_eq!(layout.shard_order(0), order);
                assert_eq!(layout.to_strided().to_vec(), strided(&factors));
                decoded += 1;
            }
        }
        assert_eq!(decoded, orders.len(), "on {mesh:?}");
    }
}

#[test]
fn strided_shards_equal_their_order_where_sizes_are_even() {
    for mesh in [&[2, 3][..], &[3, 2, 2]] {
        for order in (0..mesh.len()).permutations(mesh.len()) {
            let placements = strided(&split_factors(mesh, &order));
            let strided = StridedLayout::new(mesh, &placements).unwrap();
            let layout = strided.decode().unwrap();
            for coordinate in mesh.iter().map(|&size| 0..size).multi_cartesian_product() {
                let runs = &strided.local_runs(&[24], &coordinate)[0];
                assert_eq!(
                    runs.as_slice(),
                    layout.local_slices(&[24], &coordinate),
                    "{order:?} at {coordinate:?}"
                );
            }
        }
    }
}

#[test]
fn a_strided_shard_holds_a_chunk_of_every_block() {
    // 10 elements in 2 blocks, each split in 2: rank 0 has 3 of either block, rank 1 has 2.
    // Adjacent intervals are joined.
    let runs = |mesh: &[usize], coordinate: &[usize]| {
        let placement = StridedPlacement::Strided {
            dim: 0,
            split_factor: 2,
        };
        StridedLayout::new(mesh, &[placement])
            .unwrap()
            .local_runs(&[10], coordinate)[0]
            .to_vec()
    };
    assert_eq!(runs(&[2], &[0]), [0..3, 5..8]);
    assert_eq!(runs(&[2], &[1]), [3..5, 8..10]);
    assert_eq!(runs(&[1], &[0]), [Range { start: 0, end: 10 }]);
    assert!(runs(&[6], &[5]).is_empty());
}

/// Only the blocks with an element are visited.
#[test]
fn more_blocks_than_elements_have_one_element_each() {
    for split_factor in [3, 4, usize::MAX] {
        let placement = format!("SS(0,{split_factor})").parse().unwrap();
        let layout = StridedLayout::new(&[2], &[placement]).unwrap();
        let runs = |len: usize, rank: usize| layout.local_runs(&[len], &[rank])[0].to_vec();
        assert_eq!(runs(3, 0), [Range { start: 0, end: 3 }], "{split_factor}");
        assert!(
            runs(3, 1).is_empty() && runs(0, 0).is_empty(),
            "{split_factor}"
        );
        let dealt = layout.dealt(&[3], &[0], 0);
        assert_eq!(
            (dealt.lengths, dealt.places),
            (vec![3, 0], vec![0, 1, 2]),
            "{split_factor}"
        );
    }
}

#[test]
fn a_stride_that_is_no_order_names_those_that_are() {
    let placements = |text: &str| {
        text.split(' ')
            .map(|text| text.parse().unwrap())
            .collect_vec()
    };
    let error = Layout::from_strided(&[2, 2], &placements("R SS(0,2)")).unwrap_err();
    assert_eq!(
        error,
        PlacementError::Strided {
            mesh_dim: 1,
            dim: 0,
            split_factor: 2,
            allowed: vec![1]
        }
    );
    let error = Layout::from_strided(&[2, 3, 4], &placements("SS(1,4) S(1) S(1)")).unwrap_err();
    assert!(
        error.to_string().contains("SS(1,4) on mesh dimension 0"),
        "{error}"
    );
    assert!(
        error.to_string().contains("split factors [1, 3, 12]"),
        "{error}"
    );
    let error = StridedLayout::new(&[2], &placements("SS(1,0)")).unwrap_err();
    assert_eq!(
        error,
        PlacementError::SplitFactor {
            mesh_dim: 0,
            dim: 1
        }
    );
    assert!(error.to_string().contains("at least 1"), "{error}");
}

#[test]
fn strided_text_round_trips() {
    for text in ["R", "S(1)", "SS(0,2)", "SS(12,34)", "P(avg)"] {
        assert_eq!(text.parse::<StridedPlacement>().unwrap().to_string(), text);
    }
    for text in ["SS(0)", "SS(0,)", "SS(0,2", "SS(-1,2)"] {
        let error = text.parse::<StridedPlacement>().unwrap_err();
        assert_eq!(error, PlacementError::Unreadable { text: text.into() });
    }
}

/// The placement is equal however it is written.
#[test]
fn a_stride_of_one_is_a_plain_shard() {
    let one = StridedPlacement::Strided {
        dim: 0,
        split_factor: 1,
    };
    let plain = StridedPlacement::from(Shard(0));
    assert_eq!(one, plain);
    assert!(![one, plain].iter().all_unique(), "and has its hash");
    assert_ne!(
        one,
        StridedPlacement::Strided {
            dim: 0,
            split_factor: 2
        }
    );
    assert_ne!(one, Shard(1).into());
    let layout = Layout::from_strided(&[2, 2], &[one, one]).unwrap();
    assert_eq!(layout, Layout::new(&[2, 2], &[Shard(0), Shard(0)]).unwrap());
    assert_eq!(layout.to_strided().as_slice(), [one, one]);
}
