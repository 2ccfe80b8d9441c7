//! Ranks that survive a failure: with fewer processes, or with fewer ranks in some of them.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use burn_dtensor::comm::transport::Transport;
use burn_dtensor::comm::{Launch, LaunchError, ProcessJob, ReduceOp, World, launch};
use burn_dtensor::testing::LoopbackJob;
use burn_dtensor::{Error, Result};

/// Retries an all-reduce, and shrinks the world after each failure, until it succeeds. Returns the
/// size of the last world, and for each rank its rank in the first world.
fn persists(world: &World) -> Result<(usize, Vec<usize>)> {
    let (mut world, origin) = (world.clone(), world.rank());
    loop {
        let all = world.all();
        let mut of_all = vec![0.0; all.group().size()];
        of_all[world.rank()] = origin as f32;
        let tensor = Tensor::<1>::from_floats(&of_all[..], world.device()).into_dispatch();
        match all
            .all_reduce("origins".into(), vec![tensor], ReduceOp::Sum)
            .wait()
        {
            Ok(mut sum) => {
                let sum: Vec<f32> = Tensor::<1>::from_dispatch(sum.remove(0))
                    .into_data()
                    .try_to_vec()?;
                return Ok((
                    world.size(),
                    sum.into_iter().map(|origin| origin as usize).collect(),
                ));
            }
            Err(_) => world = world.shrink()?,
        }
    }
}

type Ends = Result<Vec<(usize, (usize, Vec<usize>))>, Box<LaunchError>>;

fn launched(
    processes: &ProcessJob,
    each: usize,
    program: impl Fn(&World) -> Result<(usize, Vec<usize>)> + Sync,
) -> Ends {
    launch(Launch::on_backend(processes.backend(each)), program).map_err(Box::new)
}

#[test]
fn ranks_go_on_without_a_process_that_is_lost() {
    for lost in 0..3 {
        let job = LoopbackJob::new(3, 20);
        let all_are_there = Barrier::new(6);
        let ends = job.run(|process, processes| {
            launched(processes, 2, |world| {
                world.barrier("start")?;
                all_are_there.wait();
                if process == lost {
                    world.run_on(2 * lost, || job.lose(lost));
                    return Err(Error::other("lost"));
                }
                persists(world)
            })
        });
        let left: Vec<_> = (0..6).filter(|rank| rank / 2 != lost).collect();
        for (process, end) in ends
            .into_iter()
            .enumerate()
            .filter(|(process, _)| *process != lost)
        {
            let expected = [0, 1].map(|thread| (2 * process + thread, (4, left.clone())));
            assert_eq!(end.unwrap(), expected, "without {lost}");
        }
    }
}

/// The remaining processes have different numbers of ranks, and one may have none.
#[test]
fn ranks_go_on_without_others_of_their_process() {
    for lost in [
        vec![0],
        vec![3],
        vec![1, 2, 5],
        vec![0, 1],
        vec![0, 2, 3, 4],
    ] {
        let job = LoopbackJob::new(3, 21);
        let all_are_there = Barrier::new(6);
        let ends = job.run(|_, processes| {
            launched(processes, 2, |world| {
                world.barrier("start")?;
                all_are_there.wait();
                if lost.contains(&world.rank()) {
                    panic!("boom")
                } else {
                    persists(world)
                }
            })
        });
        let left: Vec<_> = (0..6).filter(|rank| !lost.contains(rank)).collect();
        for (process, end) in ends.into_iter().enumerate() {
            let here: Vec<_> = left.iter().filter(|rank| *rank / 2 == process).collect();
            if here.is_empty() {
                let error = end.unwrap_err();
                assert!(
                    lost.contains(&error.rank) && error.cause.to_string().contains("boom"),
                    "{error}"
                );
                continue;
            }
            let expected: Vec<_> = here
                .into_iter()
                .map(|rank| (*rank, (left.len(), left.clone())))
                .collect();
            assert_eq!(end.unwrap(), expected, "without {lost:?}");
        }
    }
}

/// A process without surviving ranks still exists, but sends nothing in the shrunk world.
#[test]
fn ranks_survive_once_more_next_to_a_process_without_any() {
    for [first, second] in [[0, 1], [0, 2], [1, 0], [2, 0], [1, 2]] {
        let job = LoopbackJob::new(3, 22);
        let ends = job.run(|_, processes| {
            launched(processes, 1, |world| {
                let rank = world.rank();
                if rank == first {
                    panic!("boom");
                }
                assert!(world.barrier("one rank fails before this").is_err());
                let world = world.shrink()?;
                if rank == second {
                    panic!("boom again");
                }
                persists(&world)
            })
        });
        let left = 3 - first - second;
        let [(rank, (size, _))] = &ends[left].as_ref().unwrap()[..] else {
            panic!("{ends:?}")
        };
        assert_eq!((*rank, *size), (left, 1), "without {first} and {second}");
    }
}

/// Every call of `shrink` on a rank returns the same world, whichever handle it is called on.
#[test]
fn a_world_is_shrunk_to_one() {
    let job = LoopbackJob::new(2, 23);
    let ends = job.run(|_, processes| {
        launched(processes, 2, |world| {
            let [once, again] = [world.shrink()?, world.clone().shrink()?];
            once.barrier("by one handle")?;
            again.barrier("by the other")?;
            persists(&again)
        })
    });
    for (process, end) in ends.into_iter().enumerate() {
        assert_eq!(
            end.unwrap(),
            [0, 1].map(|thread| (2 * process + thread, (4, vec![0, 1, 2, 3])))
        );
    }
}

/// A rank whose program has ended has succeeded, even if another rank is lost afterwards.
#[test]
fn who_is_done_succeeds_where_others_go_on_without_a_rank() {
    let job = LoopbackJob::new(3, 24);
    let ends = job.run(|_, processes| {
        launched(processes, 1, |world| match world.rank() {
            0 => Ok((0, Vec::new())),
            1 => panic!("boom"),
            _ => persists(world),
        })
    });
    let [done, lost, left] = &ends[..] else {
        panic!("{ends:?}")
    };
    assert_eq!(done.as_ref().unwrap(), &[(0, (0, Vec::new()))]);
    assert_eq!(left.as_ref().unwrap(), &[(2, (1, vec![2]))]);
    assert!(lost.as_ref().unwrap_err().to_string().contains("boom"));
}

/// Process 0, which decides, is lost after its rank has returned, which is not a failure. Then one
/// rank calls `shrink` while another waits for it.
#[test]
fn ranks_go_on_without_the_process_that_decides_which_failure_is_the_first() {
    let job = LoopbackJob::new(3, 25);
    let ends = job.run(|_, processes| {
        launched(processes, 1, |world| match world.rank() {
            0 => Ok((0, Vec::new())),
            1 => {
                let start = Instant::now();
                while job.transports[0].sent()[1..].contains(&0) {
                    assert!(
                        start.elapsed() < Duration::from_secs(60),
                        "rank 0 has not reported that it returned"
                    );
                    thread::yield_now();
                }
                job.lose(0);
                persists(&world.shrink()?)
            }
            _ => {
                let both = world.group(&[1, 2])?;
                assert!(both.barrier("waits for rank 1".into()).wait().is_err());
                persists(&world.shrink()?)
            }
        })
    });
    for rank in [1, 2] {
        assert_eq!(
            ends[rank].as_ref().unwrap(),
            &[(rank, (2, vec![0, 1]))],
            "rank {rank}"
        );
    }
}

/// Processes are lost one after another at various times, first those that decide which ranks
/// survive.
#[test]
fn ranks_survive_whichever_is_lost_during_a_shrink() {
    for seed in 0..40 {
        let job = LoopbackJob::new(4, seed);
        let ends = job.run(|process, processes| {
            let end = launched(processes, 1, |world| {
                // Some processes may be lost before all ranks have left the barrier.
                let started = world.barrier("start");
                if process < 3 {
                    started?;
                    for _ in 0..(seed * 7 + 13 * process as u64) % 40 {
                        std::thread::yield_now();
                    }
                    if process > 0 && seed % 3 == 0 {
                        let going_on = world
                            .barrier("never")
                            .map(|()| world.clone())
                            .or_else(|_| world.shrink());
                        drop(going_on);
                    }
                    job.lose(process);
                    return Err(Error::other("lost"));
                }
                persists(world)
            });
            (process == 3).then(|| end.unwrap())
        });
        let [(3, (size, origins))] = &ends[3].as_ref().unwrap()[..] else {
            panic!("{ends:?}")
        };
        assert_eq!(
            (*size, origins.last()),
            (origins.len(), Some(&3)),
            "{seed}: {ends:?}"
        );
    }
}
