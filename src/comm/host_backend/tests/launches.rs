//! Several launches in succession, in processes that do not run in step.

use std::time::Duration;
use std::{env, fs, process, thread};

use burn::tensor::Tensor;
use burn_dtensor_flight::LaunchTrace;

use super::super::ProcessJob;
use crate::comm::{CommError, Launch, ReceivedTensors, ReduceOp, ShardedTensor, World, launch};
use crate::placement::ShardSizes;
use crate::testing::LoopbackJob as Job;
use crate::{Error, Result};

/// Returns the sum of all rank numbers, and the value of a message from the last rank (-1 on the
/// last rank itself).
fn program(world: &World) -> Result<(f32, f32)> {
    let comm = world.all();
    let last = world.size() - 1;
    let tensor = Tensor::<1>::full([1000], world.rank() as f32, world.device()).into_dispatch();
    if world.rank() == last {
        for to in 0..last {
            comm.send("message".into(), vec![tensor.clone()], to, 3)
                .wait()?;
        }
    }
    let sum = comm
        .all_reduce("sum".into(), vec![tensor], ReduceOp::Sum)
        .wait()?
        .remove(0);
    let sum = Tensor::<1>::from_dispatch(sum).mean().into_scalar();
    if world.rank() == last {
        return Ok((sum, -1.0));
    }
    let ReceivedTensors { mut tensors, .. } =
        comm.receive("message".into(), None, last, 3).wait()?;
    Ok((
        sum,
        Tensor::<1>::from_dispatch(tensors.remove(0))
            .mean()
            .into_scalar(),
    ))
}

fn launched(processes: &ProcessJob, each: usize) -> Vec<(f32, f32)> {
    let ranks = launch(Launch::on_backend(processes.backend(each)), program)
        .unwrap_or_else(|error| panic!("{error}"));
    ranks.into_iter().map(|(_, got)| got).collect()
}

#[test]
fn launches_follow_each_other_with_other_numbers_of_ranks() {
    let job = Job::new(2, 14);
    let ends = job.run(|_, processes| [2, 1, 3, 2].map(|each| launched(processes, each)));
    for (at, each) in [2, 1, 3, 2].into_iter().enumerate() {
        let got: Vec<_> = ends
            .iter()
            .flat_map(|of_process| of_process[at].clone())
            .collect();
        let last = 2 * each - 1;
        let expected = |rank: usize| {
            (
                (0..=last).sum::<usize>() as f32,
                if rank == last { -1.0 } else { last as f32 },
            )
        };
        assert_eq!(got, (0..=last).map(expected).collect::<Vec<_>>());
    }
}

/// Headers and payloads that arrive before a launch begins are kept until it begins. If `landed` is
/// set, the payloads have arrived completely by then.
#[test]
fn what_comes_before_a_launch_begins_is_kept() {
    for landed in [false, true] {
        let job = Job::new(2, 15);
        let ends = job.run(|process, processes| {
            if process == 0 {
                // That of the launch, two messages of rank 3, and the contributions of ranks 2 and
                // 3 to the reduction.
                let has_come = |state: &super::super::process_job::JobState| {
                    state.headers[1] >= 5 && (!landed || state.awaited.is_empty())
                };
                while !has_come(&processes.state.lock()) {
                    thread::yield_now();
                }
            }
            launched(processes, 2)
        });
        assert_eq!(
            ends.concat(),
            [(6.0, 3.0), (6.0, 3.0), (6.0, 3.0), (6.0, -1.0)]
        );
    }
}

/// Both processes learn both numbers, and neither waits for ranks that the other does not have.
#[test]
fn processes_that_launch_other_numbers_of_ranks_fail_with_both_numbers() {
    for numbers in [[2, 4], [4, 2], [1, 3]] {
        let job = Job::new(2, 18);
        let errors = job.run(|process, processes| {
            // Only a missing notice waits that long.
            let config = Launch::on_backend(processes.backend(numbers[process]))
                .with_deadline(Duration::from_secs(30));
            launch(config, program).map(drop).unwrap_err()
        });
        for (process, error) in errors.into_iter().enumerate() {
            let Error::Comm(CommError::UnequalRanks {
                process: here,
                ranks,
                other,
                other_ranks,
                ..
            }) = &error.cause
            else {
                panic!("process {process} of {numbers:?}: {error}")
            };
            assert_eq!([*here, *other], [process, 1 - process]);
            assert_eq!(
                [*ranks, *other_ranks],
                [2 * numbers[process], 2 * numbers[1 - process]]
            );
        }
    }
}

/// A launch fails if one of its processes is already lost.
#[test]
fn a_launch_after_a_process_is_lost_fails() {
    let job = Job::new(2, 16);
    job.lose(1);
    while job.processes[0].state.lock().lost.is_empty() {
        thread::yield_now();
    }
    let error = launch(Launch::on_backend(job.processes[0].backend(1)), program).unwrap_err();
    assert!(
        error
            .cause
            .to_string()
            .contains("lost the connection to the process of rank 1"),
        "{error}"
    );
}

/// Tests operations that are dropped before their data arrives, and messages that are never
/// received.
#[test]
fn nothing_that_comes_late_is_kept() {
    let job = Job::new(2, 17);
    job.run(|_, processes| {
        let ranks = launch(Launch::on_backend(processes.backend(1)), |world| {
            let comm = world.all();
            let tensor = || Tensor::<1>::ones([1000], world.device()).into_dispatch();
            for _ in 0..50 {
                drop(comm.all_reduce("dropped".into(), vec![tensor()], ReduceOp::Sum));
                comm.send("message".into(), vec![tensor()], 1 - world.rank(), 0)
                    .wait()?;
                drop(comm.receive("message".into(), None, 1 - world.rank(), 0));
            }
            comm.barrier("end".into()).wait()?;
            Ok(())
        });
        ranks.unwrap_or_else(|error| panic!("{error}"));
    });
    for processes in &job.processes {
        while !processes.state.lock().awaited.is_empty() {
            thread::yield_now();
        }
    }
}

/// Each rank may drop its operations before the shard of the other has arrived, so that nothing
/// completes them.
#[test]
fn nothing_is_kept_of_large_operations_that_all_ranks_drop() {
    let job = Job::new(2, 19);
    let kept = job.run(|_, processes| {
        let ranks = launch(Launch::on_backend(processes.backend(1)), |world| {
            for _ in 0..10 {
                let tensor = Tensor::<1>::ones([1 << 19], world.device()).into_dispatch();
                let shard = ShardedTensor {
                    tensor,
                    dim: 0,
                    sizes: ShardSizes::Chunked(1 << 20),
                };
                drop(world.all().all_gather("dropped".into(), vec![shard]));
            }
            world.barrier("end")?;
            let backend = processes
                .state
                .lock()
                .backends()
                .next()
                .expect("the launch has one");
            Ok(backend.completion.open())
        });
        ranks.unwrap_or_else(|error| panic!("{error}"))
    });
    assert_eq!(kept.concat(), [(0, 0), (1, 0)]);
}

/// A launch that process 0 makes alone, such as an evaluation, between those that all processes
/// make. The files of each launch are those of its ranks in all processes, and a failed launch
/// names the operations of its own rank.
#[test]
fn a_launch_of_one_process_alone_is_not_mixed_up_with_those_of_all() {
    let folder = env::temp_dir().join(format!("burn-dtensor-launches-{}", process::id()));
    let job = Job::new(2, 18);
    let ends = job.run(|process, processes| {
        let launched = |config: Launch, label: &str, fails: bool| {
            launch(config.with_flight_recorder(&folder), |world| {
                world.barrier(label)?;
                if fails && world.rank() == 1 {
                    Err(crate::Error::other("no more"))
                } else {
                    world.barrier("end")
                }
            })
        };
        let all = || Launch::on_backend(processes.backend(1));
        launched(all(), "first", false).unwrap();
        if process == 0 {
            launched(Launch::threads(2), "evaluation", false).unwrap();
        }
        launched(all(), "second", true).map(drop).unwrap_err()
    });
    for error in ends {
        let last: Vec<_> = error.last.iter().map(|id| &*id.label).collect();
        assert_eq!((error.rank, last), (1, vec!["second"]), "{error}");
    }
    let launches = LaunchTrace::read(&folder).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    let found: Vec<_> = launches
        .iter()
        .map(|launch| {
            let labels: Vec<_> = launch
                .ranks
                .iter()
                .map(|trace| trace.operations[0].id.label.to_string())
                .collect();
            (launch.launch.process, launch.launch.number, labels)
        })
        .collect();
    let of_all = |number, label: &str| (None, number, vec![label.to_owned(); 2]);
    let [first, second, (Some(0), _, evaluation)] = &found[..] else {
        panic!("{found:?}")
    };
    assert_eq!([first, second], [&of_all(0, "first"), &of_all(1, "second")]);
    assert_eq!(evaluation, &["evaluation"; 2]);
}
