//! The handle of a collective under way: waited for, asked, or dropped.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Shape, Tensor};
use burn_dtensor::comm::{
    Call, Communicator, OpTiming, ReduceOp, ShardedTensor, TensorMeta, TransferTiming, Work, World,
};
use burn_dtensor::placement::ShardSizes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{into_data, run};

/// The element `at` of what a rank contributes to call number `call`.
fn element(call: usize, rank: usize, at: usize) -> f32 {
    (100 * call + 10 * rank + at) as f32
}

/// Returns this rank's contribution: an element for each rank of `comm`.
fn own(world: &World, comm: &Communicator, call: usize) -> Tensor<1> {
    let elements = (0..comm.group().size()).map(|at| element(call, comm.group().rank(), at));
    Tensor::from_data(&elements.collect::<Vec<_>>()[..], world.device())
}

fn floats(tensor: DispatchTensor) -> Vec<f32> {
    into_data(tensor).try_to_vec().unwrap()
}

fn first(mut tensors: Vec<DispatchTensor>) -> Vec<f32> {
    floats(tensors.remove(0))
}

/// Posts call number `call`, of one of four kinds, and returns what it must give.
fn post(world: &World, comm: &Communicator, call: usize) -> (Vec<f32>, Work<Vec<f32>>) {
    let (size, rank) = (comm.group().size(), comm.group().rank());
    let own = own(world, comm, call);
    let of = |rank| (0..size).map(move |at| element(call, rank, at));
    let sum = |at| (0..size).map(|rank| element(call, rank, at)).sum::<f32>();
    let rows = |tensor, rows| ShardedTensor {
        tensor,
        dim: 0,
        sizes: ShardSizes::Chunked(rows),
    };
    match call % 4 {
        0 => {
            let shard = rows(own.into_dispatch(), size * size);
            let work = comm.all_gather(Call::default(), vec![shard]);
            ((0..size).flat_map(of).collect(), work.then(first))
        }
        1 => {
            let full = rows(own.into_dispatch(), size);
            let work = comm.reduce_scatter(Call::default(), vec![full], ReduceOp::Sum);
            (vec![sum(rank)], work.then(first))
        }
        2 => {
            let row = rows(own.reshape([1, size]).into_dispatch(), size);
            let work = comm.all_to_all(Call::default(), row, 1, ShardSizes::Chunked(size));
            let column = |tensor| {
                let column = Tensor::<2>::from_dispatch(tensor).into_data();
                column.try_to_vec().unwrap()
            };
            let expected = (0..size).map(|other| element(call, other, rank));
            (expected.collect(), work.then(column))
        }
        _ => {
            let full = vec![own.into_dispatch()];
            let work = comm.all_reduce(Call::default(), full, ReduceOp::Sum);
            ((0..size).map(sum).collect(), work.then(first))
        }
    }
}

/// All-gathers, reduce-scatters, all-to-alls and all-reduces. Each rank draws its own order.
#[test]
fn works_may_be_waited_for_in_any_order_or_not_at_all() {
    run(4, |world| {
        let comm = world.all();
        for round in 0..20 {
            let mut rng = StdRng::seed_from_u64(round * 4 + world.rank() as u64);
            let mut works: Vec<_> = (0..12)
                .map(|call| (call, post(world, &comm, call)))
                .collect();
            while !works.is_empty() {
                let (call, (expected, work)) = works.swap_remove(rng.random_range(0..works.len()));
                if rng.random_bool(0.3) {
                    continue;
                }
                assert_eq!(work.wait()?, expected, "call {call}");
            }
        }
        Ok(())
    });
}

/// A collective, after the result that it must have on this rank, if any.
type Rooted = (Option<Vec<f32>>, Work<Option<Vec<f32>>>);

/// Posts a broadcast, a scatter, a reduction and a gather of group rank `root`.
fn post_rooted(world: &World, comm: &Communicator, root: usize) -> [Rooted; 4] {
    let (size, rank) = (comm.group().size(), comm.group().rank());
    let own = || own(world, comm, root).into_dispatch();
    let on_root = || (rank == root).then(|| vec![own()]);
    let meta = || TensorMeta {
        shape: Shape::from([size]),
        dtype: DType::F32,
    };
    let metas = (rank == root).then(|| (0..size).map(|_| meta()).collect());
    let sharding = vec![(0, ShardSizes::Chunked(size))];
    let broadcast = comm.broadcast(Call::default(), on_root(), vec![meta()], root);
    let scatter = comm.scatter(Call::default(), on_root(), vec![meta()], sharding, root);
    let reduce = comm.reduce(Call::default(), vec![own()], ReduceOp::Sum, root);
    let gather = comm.gather(Call::default(), own(), metas, root);

    let of = |rank| (0..size).map(move |at| element(root, rank, at));
    let sum = |at| (0..size).map(|rank| element(root, rank, at)).sum::<f32>();
    let copy: Vec<_> = of(root).collect();
    let shard = vec![copy[rank]];
    let sums = (rank == root).then(|| (0..size).map(sum).collect());
    let all = (rank == root).then(|| (0..size).flat_map(of).collect());
    let every = |tensors: Vec<_>| tensors.into_iter().flat_map(floats).collect();
    [
        (Some(copy), broadcast.then(|got| Some(first(got)))),
        (Some(shard), scatter.then(|got| Some(first(got)))),
        (sums, reduce.then(|got| got.map(first))),
        (all, gather.then(move |got| got.map(every))),
    ]
}

/// Other collectives run from beginning to end while those of every root are in flight, which are
/// waited for from the last to the first.
#[test]
fn collectives_with_a_root_are_waited_for_after_other_work() {
    run(3, |world| {
        for ranks in [[0, 1, 2], [2, 0, 1]] {
            let comm = world.group(&ranks)?;
            let posted = (0..3).flat_map(|root| post_rooted(world, &comm, root));
            let posted: Vec<_> = posted.collect();
            for call in 0..4 {
                let (expected, work) = post(world, &comm, call);
                assert_eq!(work.wait()?, expected, "call {call} between");
            }
            world.barrier("all have posted")?;
            assert!(posted.iter().all(|(_, work)| work.is_complete()));
            for (at, (expected, work)) in posted.into_iter().enumerate().rev() {
                assert_eq!(work.wait()?, expected, "operation {at} on {ranks:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn a_work_says_when_all_have_joined() {
    run(2, |world| {
        let (comm, pair) = (world.all(), world.group(&[1, 0])?);
        if world.rank() == 0 {
            let work = comm.barrier("late".into());
            assert!(!work.is_complete());
            pair.barrier("go".into()).wait()?;
            pair.barrier("gone".into()).wait()?;
            assert!(work.is_complete());
            work.wait()?;
        } else {
            pair.barrier("go".into()).wait()?;
            let work = comm.barrier("late".into());
            pair.barrier("gone".into()).wait()?;
            work.wait()?;
        }
        Ok(())
    });
}

#[test]
fn among_threads_the_rank_that_waits_copies() {
    run(2, |world| {
        let tensor = Tensor::<1>::ones([3], world.device()).into_dispatch();
        let (_, course) = world
            .all()
            .all_reduce(Call::default(), vec![tensor], ReduceOp::Sum)
            .wait_with_timing()?;
        let course = course.expect("there are two ranks");
        let OpTiming {
            posted,
            transfer:
                TransferTiming {
                    send_started,
                    started,
                    completed,
                },
            requested,
        } = course;
        assert_eq!(send_started, Some(posted));
        assert!(
            [posted, requested, started, completed].is_sorted(),
            "{course:?}"
        );
        let (_, alone) = world
            .group(&[world.rank()])?
            .barrier(Call::default())
            .wait_with_timing()?;
        assert_eq!(alone, None, "nothing has moved");
        Ok(())
    });
}
