//! Requests that a rank has not waited for are completed while it does something else.

use std::thread;
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn::tensor::{Tensor, TensorData};
use burn_dtensor::comm::{
    CommError, Communicator, Launch, OpTiming, ProcessJob, ReduceOp, ShardedTensor, TransferTiming,
    Work, World, launch,
};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::testing::LoopbackJob;
use burn_dtensor::{Error, Result};

use super::bits::values;
use super::read;

/// Shape of each rank's tensor: large enough for the completion thread, and for shards that are
/// received in place.
const SHAPE: [usize; 2] = [100, 6000];

/// A collective in flight, with the tensor that this rank contributes.
type Posted = (Tensor<2>, Work<Vec<DispatchTensor>>);

/// A collective, called with the rank's own tensor.
type Make = fn(&Communicator, Tensor<2>) -> Work<Vec<DispatchTensor>>;

const CALLS: [Make; 7] = [
    |comm, tensor| comm.all_gather("contiguous".into(), vec![shard(comm, tensor, 0)]),
    |comm, tensor| comm.all_gather("strided".into(), vec![shard(comm, tensor, 1)]),
    |comm, tensor| {
        one(comm.all_to_all(
            "contiguous".into(),
            shard(comm, tensor, 0),
            1,
            ShardSizes::Chunked(SHAPE[1]),
        ))
    },
    |comm, tensor| {
        one(comm.all_to_all(
            "strided".into(),
            shard(comm, tensor, 1),
            0,
            ShardSizes::Chunked(SHAPE[0]),
        ))
    },
    |comm, tensor| {
        let splits = vec![SHAPE[0] / comm.group().size(); comm.group().size()];
        one(comm.all_to_all_single("rows".into(), tensor.into_dispatch(), &splits, &splits))
    },
    |comm, tensor| {
        let full = ShardedTensor {
            tensor: tensor.into_dispatch(),
            dim: 0,
            sizes: ShardSizes::Chunked(SHAPE[0]),
        };
        comm.reduce_scatter("shards".into(), vec![full], ReduceOp::Avg)
    },
    |comm, tensor| {
        comm.all_reduce(
            "two phases".into(),
            vec![tensor.into_dispatch()],
            ReduceOp::Sum,
        )
    },
];

fn shard(comm: &Communicator, tensor: Tensor<2>, dim: usize) -> ShardedTensor {
    ShardedTensor {
        tensor: tensor.into_dispatch(),
        dim,
        sizes: ShardSizes::Chunked(SHAPE[dim] * comm.group().size()),
    }
}

fn one(work: Work<DispatchTensor>) -> Work<Vec<DispatchTensor>> {
    work.then(|tensor| vec![tensor])
}

fn given(world: &World, seed: usize) -> Tensor<2> {
    let data = TensorData::new(
        values(world.rank() + 5 * seed, SHAPE.iter().product()),
        SHAPE,
    );
    Tensor::from_data(data, world.device())
}

/// Starts one collective of each kind, without waiting for it.
fn posted(world: &World) -> Vec<Posted> {
    let post = |(seed, call): (usize, &fn(&_, _) -> _)| {
        let tensor = given(world, seed);
        (tensor.clone(), call(&world.all(), tensor))
    };
    CALLS.iter().enumerate().map(post).collect()
}

/// Yields until the backend has released its handle to `tensor`, which it needs until the call is
/// complete.
fn await_given_back(tensor: &Tensor<2>) {
    let start = Instant::now();
    while !tensor.can_mut() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "the completion thread does not complete the request"
        );
        thread::yield_now();
    }
}

fn await_complete(work: &Work<Vec<DispatchTensor>>) {
    while !work.is_complete() {
        thread::yield_now();
    }
}

fn taken(work: Work<Vec<DispatchTensor>>) -> Result<Vec<Vec<u8>>> {
    Ok(work
        .wait()?
        .into_iter()
        .map(|tensor| read(tensor).as_bytes().to_vec())
        .collect())
}

/// Starts the collectives on all ranks, in several numbers of processes, and returns the results of
/// `meanwhile` with them.
fn after<T: Send>(
    meanwhile: impl Fn(&World, Vec<Posted>) -> Result<T> + Sync,
) -> Vec<(usize, Vec<(usize, T)>)> {
    let mut ends = Vec::new();
    for (processes, each) in [(2, 2), (4, 1)] {
        let job = LoopbackJob::new(processes, 30);
        let run = |_, processes: &ProcessJob| {
            launch(Launch::on_backend(processes.backend(each)), |world| {
                meanwhile(world, posted(world))
            })
        };
        let got = job
            .run(run)
            .into_iter()
            .flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")));
        ends.push((processes, got.collect()));
    }
    ends
}

fn of_threads() -> Vec<(usize, Vec<Vec<Vec<u8>>>)> {
    let program = |world: &World| {
        posted(world)
            .into_iter()
            .map(|(_, work)| taken(work))
            .collect()
    };
    launch(Launch::threads(4), program).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_result_made_in_the_background_is_the_same() {
    let made = after(|_, posted| {
        let mut got = Vec::new();
        for (tensor, work) in posted {
            await_given_back(&tensor);
            await_complete(&work);
            got.push(taken(work)?);
        }
        Ok(got)
    });
    let expected = of_threads();
    made.into_iter()
        .for_each(|(processes, got)| assert!(got == expected, "{processes} processes"));
}

#[test]
fn a_rank_that_polls_gets_the_same() {
    let polled = after(|_, posted| {
        let got = posted.into_iter().map(|(_, work)| {
            await_complete(&work);
            taken(work)
        });
        got.collect::<Result<Vec<_>>>()
    });
    let expected = of_threads();
    polled
        .into_iter()
        .for_each(|(processes, got)| assert!(got == expected, "{processes} processes"));
}

/// Ranks drop operations before they complete and after; the other ranks get their results.
#[test]
fn what_is_dropped_is_given_back() {
    let dropped = after(|world, posted| {
        let mut got = Vec::new();
        for (at, (tensor, work)) in posted.into_iter().enumerate() {
            match (at + world.rank()) % 3 {
                0 => drop(work),
                1 => {
                    await_given_back(&tensor);
                    drop(work);
                }
                _ => got.push((at, taken(work)?)),
            }
            await_given_back(&tensor);
        }
        world.barrier("all have their results")?;
        Ok(got)
    });
    let expected = of_threads();
    for (processes, ranks) in dropped {
        for (rank, got) in ranks {
            let is_expected = |(at, got): &(usize, Vec<Vec<u8>>)| *got == expected[rank].1[*at];
            assert!(
                got.iter().all(is_expected),
                "rank {rank} of {processes} processes"
            );
        }
    }
}

/// A result that is complete remains available after a failure. A request that is incomplete then
/// fails.
#[test]
fn a_failure_spares_what_is_made() {
    let job = LoopbackJob::new(2, 31);
    let ends = job.run(|_, processes| {
        launch(Launch::on_backend(processes.backend(1)), |world| {
            let mut posted = posted(world);
            posted
                .iter()
                .for_each(|(tensor, _)| await_given_back(tensor));
            world.barrier("all results are complete")?;
            if world.rank() == 1 {
                return Err(Error::other("boom"));
            }
            let (_, open) = posted.remove(0);
            let alone = CALLS[0](&world.all(), given(world, 0));
            let told = alone.wait().unwrap_err();
            assert!(
                matches!(told, CommError::RankFailed { rank: 1, .. }),
                "{told}"
            );
            assert_eq!(
                taken(open)?[0].len(),
                2 * 4 * SHAPE.iter().product::<usize>()
            );
            posted
                .into_iter()
                .try_for_each(|(_, work)| taken(work).map(drop))?;
            Ok(())
        })
    });
    ends.into_iter()
        .for_each(|end| assert_eq!(end.unwrap_err().rank, 1));
}

/// Rank 0 calls before rank 1, and requests the result when all data has arrived. The timestamps
/// must be correct whichever thread computed the result.
#[test]
fn a_course_says_when_what_others_bring_came() {
    let ends = LoopbackJob::new(2, 32).run(|_, processes| {
        launch(Launch::on_backend(processes.backend(1)), |world| {
            let (all, other) = (world.all(), world.all().duplicate("control"));
            for (seed, call) in CALLS.iter().enumerate() {
                let tensor = given(world, seed);
                if world.rank() == 1 {
                    other.barrier("0 has posted".into()).wait()?;
                    call(&all, tensor).wait()?;
                    continue;
                }
                let work = call(&all, tensor);
                let moment = Instant::now();
                other.barrier("0 has posted".into()).wait()?;
                await_complete(&work);
                let (_, course) = work.wait_with_timing()?;
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
                assert!(
                    posted <= moment && send_started.is_none_or(|sent| posted <= sent),
                    "call {seed}: {course:?}"
                );
                assert!(
                    [moment, started, completed, requested].is_sorted(),
                    "call {seed}: {course:?} after {moment:?}"
                );
            }
            Ok(())
        })
    });
    ends.into_iter()
        .for_each(|end| drop(end.unwrap_or_else(|error| panic!("{error}"))));
}

/// The transport may back off as long as ranks compute.
#[test]
fn a_rank_that_begins_to_wait_hurries_its_courier_and_no_other() {
    let job = LoopbackJob::new(2, 40);
    let ends = job.run(|process, processes| {
        launch(Launch::on_backend(processes.backend(1)), |world| {
            if process == 0 {
                return world.barrier("waits for process 1");
            }
            let start = Instant::now();
            while job.polled(0) == 0 {
                assert!(
                    start.elapsed() < Duration::from_secs(60),
                    "no rank has called `poll_now`"
                );
                thread::yield_now();
            }
            assert_eq!(job.polled(1), 0, "no rank of process 1 waits");
            world.barrier("waits for process 1")
        })
    });
    ends.into_iter().for_each(|end| drop(end.unwrap()));
}
