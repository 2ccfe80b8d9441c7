//! Every collective of thread ranks, against brute force; and that the seam is real: a backend that
//! has nothing in common with theirs passes the same.

use burn::tensor::{DType, Int, Shape, Tensor};
use burn_dtensor::comm::{Call, CollectivePlan, Launch, ReduceOp, TensorMeta};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::testing::Conformance;

use super::run;

/// On worlds of several sizes, of which each has groups of several sizes.
fn threads(check: &str) {
    for ranks in crate::CONFORMING {
        let conformance = Conformance::of(Launch::threads).with_ranks([ranks]);
        let conformance = if ranks > 2 && !crate::effort::is_long() {
            conformance.with_few_cases()
        } else {
            conformance
        };
        assert!(conformance.check(check) > 0);
    }
}

/// Checks that the others are most like, where ranks are many: every one takes seconds.
const OF_MANY_RANKS: [&str; 7] = [
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "messages",
];

/// On the world, and on the rows and columns of a mesh: with `LONG_TESTS` every check, of every case.
#[test]
fn checks_hold_on_128_ranks() {
    let of_check = |check| {
        let conformance = Conformance::of(Launch::threads).with_ranks([128]);
        let cases = match crate::effort::is_long() {
            true => conformance,
            false => conformance.with_few_cases(),
        }
        .check(check);
        assert!(cases > 0, "{check}");
        cases
    };
    let cases: usize = match crate::effort::is_long() {
        true => Conformance::names().map(of_check).sum(),
        false => OF_MANY_RANKS.into_iter().map(of_check).sum(),
    };
    println!("{cases} cases");
}

#[test]
fn all_gather_restores_the_full_tensor() {
    threads("all_gather");
}

#[test]
fn a_list_of_any_dtypes_dimensions_and_shard_sizes_is_gathered_at_once() {
    threads("all_gather_coalesced");
}

#[test]
fn a_plan_is_carried_out_again_and_again() {
    threads("planned");
}

#[test]
fn a_stack_of_tensors_has_a_dimension_for_the_ranks() {
    threads("all_gather_stacked");
}

#[test]
fn every_rank_gets_the_tensors_of_all() {
    threads("all_gather_list");
}

#[test]
fn reduce_scatter_gives_each_rank_its_part_of_the_reduction() {
    threads("reduce_scatter");
}

#[test]
fn a_list_is_reduced_for_each_rank_its_own() {
    threads("reduce_scatter_list");
}

#[test]
fn all_reduce_gives_every_rank_the_same() {
    threads("all_reduce");
}

#[test]
fn a_list_is_reduced_as_each_of_its_tensors() {
    threads("all_reduce_coalesced");
}

#[test]
fn all_to_all_moves_the_sharding_to_another_dimension() {
    threads("all_to_all");
}

#[test]
fn all_to_all_list_gives_every_rank_what_each_has_for_it() {
    threads("all_to_all_list");
}

#[test]
fn all_to_all_single_sends_rows_by_equal_and_other_splits() {
    threads("all_to_all_single");
}

#[test]
fn broadcast_copies_every_roots_tensor() {
    threads("broadcast");
}

#[test]
fn scatter_gives_each_rank_its_part_of_every_roots_tensor() {
    threads("scatter");
}

#[test]
fn reduce_gives_the_root_the_reduction_and_the_others_nothing_twice() {
    threads("reduce");
}

#[test]
fn gather_gives_the_root_every_tensor_and_the_others_nothing() {
    threads("gather");
}

#[test]
fn sparse_sums_have_the_union_of_the_indices() {
    threads("sparse");
}

/// In half precision, the larger number plus 1 is rounded to the larger number.
#[test]
fn sparse_sums_of_half_precision_are_rounded_once() {
    for (dtype, larger) in [(DType::F16, 2048.0), (DType::BF16, 256.0)] {
        run(3, |world| {
            let own = if world.rank() == 0 { larger } else { 1.0 };
            let index = Tensor::<1, Int>::from_data([4], world.device());
            let row = Tensor::<2>::full([1, 2], own, (world.device(), dtype));
            let (_, sums) = world.all().all_reduce_sparse("rows".into(), index, row)?;
            assert_eq!(sums.dtype(), dtype);
            let sums: Vec<f64> = sums.into_data().iter().collect();
            assert_eq!(sums, [larger + 2.0; 2], "{dtype:?}");
            Ok(())
        });
    }
}

#[test]
fn objects_are_equal_where_they_arrive() {
    threads("objects");
}

#[test]
fn messages_arrive_by_tag_in_order_and_from_any_rank() {
    threads("messages");
}

#[test]
fn messages_cross_barriers() {
    threads("barrier");
}

#[test]
fn calls_meet_in_the_order_in_which_they_are_posted() {
    threads("order");
}

#[test]
fn sums_are_of_neighbours_first_and_rounded_once() {
    threads("bits");
}

#[test]
fn wrong_use_is_named_on_every_rank() {
    assert!(
        Conformance::of(Launch::threads)
            .with_ranks([2, 3, 8])
            .misuse()
            >= 3 * 38
    );
}

#[test]
fn a_plan_that_was_sent_is_the_plan() {
    run(2, |world| {
        let comm = world.all();
        let meta = TensorMeta {
            shape: Shape::from([5, 3]),
            dtype: DType::F32,
        };
        let plan = comm.plan_reduce_scatter(
            vec![(meta, 0, ShardSizes::Uneven([4, 1].into()))],
            ReduceOp::Max,
        )?;
        let sent: CollectivePlan =
            postcard::from_bytes(&postcard::to_stdvec(&*plan).unwrap()).unwrap();
        assert_eq!(format!("{sent:?}"), format!("{plan:?}"));
        assert_eq!((sent.tensors(), sent.ranks()), (plan.tensors(), 2));
        let full = Tensor::<2>::full([5, 3], world.rank() as f32, world.device());
        let shard = comm
            .execute_plan("sent".into(), &sent.into(), vec![full.into_dispatch()])
            .wait()?
            .remove(0);
        let expected = vec![1.0; 3 * [4, 1][world.rank()]];
        assert_eq!(
            Tensor::<2>::from_dispatch(shard)
                .into_data()
                .try_to_vec::<f32>()
                .unwrap(),
            expected
        );
        Ok(())
    });
}

#[test]
fn a_plan_keeps_a_value_of_each_type() {
    run(1, |world| {
        let meta = TensorMeta {
            shape: Shape::from([5]),
            dtype: DType::F32,
        };
        let sizes = ShardSizes::Chunked(5);
        let plan = world.all().plan_all_gather(vec![(meta, 0, sizes)])?;
        assert_eq!((plan.kept(|| 1_u8), plan.kept(|| "one")), (&1, &"one"));
        assert_eq!((plan.kept(|| 2_u8), plan.kept(|| "two")), (&1, &"one"));
        Ok(())
    });
}

#[test]
fn the_average_is_the_sum_over_the_number_of_ranks() {
    for ranks in [1, 2, 3, 5, 8] {
        run(ranks, |world| {
            let value = |rank: usize, i: usize| ((i * 7 + rank * 11) % 5) as f64;
            for dtype in [DType::F32, DType::F64] {
                let own: Vec<f64> = (0..33).map(|i| value(world.rank(), i)).collect();
                let tensor =
                    Tensor::<1>::from_data(&own[..], (world.device(), dtype)).into_dispatch();
                let average = world
                    .all()
                    .all_reduce(Call::default(), vec![tensor], ReduceOp::Avg)
                    .wait()?
                    .remove(0);
                let sums = (0..33).map(|i| (0..ranks).map(|rank| value(rank, i)).sum::<f64>());
                let expected: Vec<f64> = match dtype {
                    DType::F32 => sums
                        .map(|sum| f64::from(sum as f32 / ranks as f32))
                        .collect(),
                    _ => sums.map(|sum| sum / ranks as f64).collect(),
                };
                assert_eq!(
                    Tensor::<1>::from_dispatch(average)
                        .into_data()
                        .iter::<f64>()
                        .collect::<Vec<_>>(),
                    expected
                );
            }
            Ok(())
        });
    }
}
