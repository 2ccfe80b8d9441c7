//! A failure that ends a launch in one process ends it in all processes, with the same error.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Tensor;
use burn_dtensor_flight::LaunchId;

use super::super::ProcessJob;
use super::super::header::{
    ControlMessage, DataMode, EncodedSignature, Header, PayloadDesc, RemoteGroupId, RemoteGroupInfo, Said,
};
use super::loopback::Job;
use crate::comm::backend::CallSignature;
use crate::comm::transport::{Message, Transport};
use crate::comm::{Call, CommError, Communicator, Launch, LaunchError, Op, RankReport, ReduceOp, World, launch};
use crate::{Error, Result};

const FAR: Duration = Duration::from_secs(3600);

/// Runs `program` in one process and returns the outcome of its launch.
#[expect(clippy::result_large_err, reason = "made once per test")]
fn launched<T: Send>(
    processes: &ProcessJob,
    each: usize,
    program: impl Fn(&World) -> Result<T> + Sync,
) -> Result<Vec<(usize, T)>, LaunchError> {
    launch(Launch::on_backend(processes.engine(each)).with_deadline(FAR), program)
}

fn sum(world: &World, comm: &Communicator, label: &str, len: usize) -> Result<()> {
    let tensor = Tensor::<1>::ones([len], world.device()).into_dispatch();
    Ok(comm.all_reduce(label.into(), vec![tensor], ReduceOp::Sum).wait().map(|_| ())?)
}

fn left(rank: usize) -> RankReport {
    RankReport { rank, doing: "finished".into(), error: None, at: None }
}

/// Lets one of four ranks, in two processes, call `wrong` while the others reduce; each rank takes this role once.
/// Checks the error of each launch and of each other rank.
fn provoke(wrong: impl Fn(&World, &Communicator) -> Result<()> + Sync, is_it: impl Fn(&CommError, usize) -> bool) {
    for culprit in 0..4 {
        let job = Job::new(2, 40 + culprit as u64);
        let ends = job.run(|_, processes| {
            launched(processes, 2, |world| {
                let comm = world.all();
                sum(world, &comm, "before", 3)?;
                if world.rank() == culprit { wrong(world, &comm) } else { sum(world, &comm, "sum", 3) }
            })
        });
        let causes: Vec<_> = ends.into_iter().map(|end| end.expect_err("a rank has failed")).collect();
        for (process, error) in causes.iter().enumerate() {
            // Each process has the same report of all ranks, which process 0 prints.
            assert_eq!(error.to_string(), causes[0].to_string(), "rank {culprit}, process {process}");
            assert_eq!((error.others.len(), error.is_reported_by_other_process), (3, process > 0), "{error}");
            for other in error.others.iter().filter(|other| other.rank != culprit) {
                let Some(Error::Comm(told)) = &other.error else { panic!("rank {culprit}: {error}") };
                assert!(is_it(told, culprit), "rank {culprit}: rank {} received {told}", other.rank);
            }
        }
    }
}

#[test]
fn a_panic_in_any_process_ends_all() {
    provoke(
        |_, _| panic!("boom"),
        |error, culprit| {
            let CommError::RankPanicked { rank, message, during: Some(id) } = error else { return false };
            (*rank, message.as_str(), id.op) == (culprit, "boom", Op::AllReduce)
        },
    );
}

#[test]
fn an_error_in_any_process_ends_all() {
    provoke(
        |_, _| Err(Error::other("no such file")),
        |error, culprit| matches!(error, CommError::RankFailed { rank, .. } if *rank == culprit),
    );
}

#[test]
fn an_early_return_in_any_process_is_told_in_all() {
    provoke(
        |_, _| Ok(()),
        |error, culprit| matches!(error, CommError::RankReturned { rank, during } if *rank == culprit && during.seq == 1),
    );
}

#[test]
fn a_mismatch_is_one_in_all_processes() {
    provoke(
        |world, comm| sum(world, comm, "sum", 4),
        |error, culprit| match error {
            CommError::Mismatch { rank, other, differs, .. } => {
                // The rank that calls second is blamed, so the culprit is either of the two ranks.
                [*rank, *other].contains(&culprit) && differs.starts_with("tensor 0: shape [")
            }
            _ => false,
        },
    );
}

/// A rank waits for a rank of another process that does not call.
#[test]
fn a_deadline_ends_all_processes() {
    let job = Job::new(2, 3);
    let ends = job.run(|_, processes| {
        launched(processes, 1, |world| {
            let comm = world.all();
            if world.rank() == 0 {
                // Rank 0 does not block in a wait: it polls for a message that is never sent.
                let work = comm.receive(Call::new("never"), None, 1, 0);
                while !work.is_complete() {
                    std::thread::yield_now();
                }
                return Ok(work.wait().map(|_| ())?);
            }
            Ok(comm.barrier("late".into()).wait_timeout(Duration::from_millis(20))?)
        })
    });
    for end in ends {
        let error = end.unwrap_err();
        assert!(
            matches!(&error.cause, Error::Comm(CommError::DeadlineExceeded { rank: 1, missing, .. }) if missing == &[0])
        );
    }
}

/// One failure is decided to be the first, even if each process finds another one first.
#[test]
fn of_failures_everywhere_at_once_one_counts() {
    for seed in 0..20 {
        let job = Job::new(3, seed);
        let ends = job.run(|_, processes| {
            launched(processes, 2, |world| {
                world.barrier("start")?;
                if world.rank() % 2 == 0 {
                    panic!("boom {}", world.rank());
                }
                sum(world, &world.all(), "sum", 3 + world.rank())
            })
        });
        let causes: Vec<_> = ends.into_iter().map(|end| end.unwrap_err()).collect();
        let first = causes[0].cause.to_string();
        assert!(causes.iter().all(|error| error.cause.to_string() == first), "{causes:?}");
    }
}

#[test]
fn a_launch_that_fails_elsewhere_fails_here_though_all_ranks_here_succeed() {
    let job = Job::new(2, 5);
    let ends = job.run(|_, processes| {
        launched(processes, 1, |world| if world.rank() == 1 { Err(Error::other("alone")) } else { Ok(()) })
    });
    for end in ends {
        let error = end.unwrap_err();
        assert_eq!((error.rank, error.cause.to_string().contains("alone")), (1, true), "{error}");
    }
}

/// If all ranks have handled a failure, the launch succeeds in all processes.
#[test]
fn a_failure_that_every_rank_takes_is_no_end() {
    let job = Job::new(2, 6);
    let ends = job.run(|_, processes| {
        launched(processes, 1, |world| Ok(sum(world, &world.all(), "sum", 3 + world.rank()).unwrap_err().to_string()))
    });
    let told: Vec<_> = ends.into_iter().map(|end| end.unwrap().remove(0).1).collect();
    assert!(told[0].contains("disagree") && told[0] == told[1], "{told:?}");
}

#[test]
fn a_process_that_is_lost_ends_the_others() {
    for lost in 0..3 {
        let job = Job::new(3, 8);
        let ends = job.run(|process, processes| {
            launched(processes, 1, |world| {
                world.barrier("start")?;
                if process == lost {
                    job.lose(lost);
                    return Ok(());
                }
                world.barrier("end")
            })
        });
        for (process, end) in ends.into_iter().enumerate().filter(|(process, _)| *process != lost) {
            let error = end.unwrap_err();
            let Error::Comm(CommError::Disconnected { rank, .. }) = &error.cause else { panic!("{process}: {error}") };
            assert_eq!(*rank, lost);
            // Process 0 prints the error, unless process 0 is lost.
            assert_eq!(
                (error.others.len(), error.is_reported_by_other_process),
                (2, process > 0 && lost > 0),
                "{error}"
            );
        }
    }
}

/// If a process receives an invalid header, which no backend sends, the error names the sender and no thread
/// panics.
#[test]
fn a_header_that_cannot_be_right_is_an_error() {
    let print = || EncodedSignature::of(&CallSignature::new(Op::Barrier, &Call::new("end"), Vec::new()));
    let of = |ranks: &[usize], member| RemoteGroupInfo { ranks: ranks.to_vec(), name: String::new(), member };
    let channel = |introduction| RemoteGroupId { number: 1000, introduction };
    let join = |introduction, seq| {
        let print = print();
        let print = Said::Full { number: None, print: &print };
        let contents = PayloadDesc::default();
        let (channel, when) = (channel(introduction), DataMode::Eager);
        let word = ControlMessage::Joined { channel, seq, print, digests: None, when, contents };
        Header { launch: LaunchId::first(0), word }.write()
    };
    let message = |to| {
        let print = print();
        let channel = channel(Some(of(&[0, 1], 1)));
        let word = ControlMessage::Sent { channel, to, tag: 0, print: &print, contents: PayloadDesc::default() };
        Header { launch: LaunchId::first(0), word }.write()
    };
    let write = |word: ControlMessage<&EncodedSignature>| Header { launch: LaunchId::first(0), word }.write();
    let known = write(ControlMessage::Joined {
        channel: channel(Some(of(&[0, 1], 1))),
        seq: 0,
        print: Said::Known { number: 3 },
        digests: None,
        when: DataMode::Eager,
        contents: PayloadDesc::default(),
    });
    let wrong = [
        (Vec::new(), "of 0 bytes cannot be decoded"),
        (vec![0, 99, 1, 2, 3], "cannot be decoded"),
        (join(None, 0), "it has not introduced channel 1000"),
        (join(Some(of(&[0, 1], 0)), 0), "it called as invalid member 0 of a group of ranks [0, 1]"),
        (join(Some(of(&[0, 1], 7)), 0), "it called as invalid member 7"),
        (join(Some(of(&[0, 9], 1)), 0), "of a group of ranks [0, 9]"),
        (join(Some(of(&[1, 0], 0)), 5), "it sent call 5 of a group where call 0 is next"),
        (known, "it has not defined signature 3"),
        (
            write(ControlMessage::Pull { channel: 0, seq: 7, wanted: true }),
            "it requested data that was not offered in call 7",
        ),
        (
            write(ControlMessage::Data { channel: 1000, seq: 0, contents: PayloadDesc::default() }),
            "it has not introduced channel 1000",
        ),
        (message(2), "it sent a message to member 2 of a group of 2"),
        (write(ControlMessage::RankExited(left(0))), "it reported the exit of rank 0 of another process"),
    ];
    for (header, problem) in wrong {
        let job = Job::new(2, 9);
        let ends = job.run(|_, processes| {
            launched(processes, 1, |world| {
                world.barrier("start")?;
                if world.rank() == 1 {
                    job.couriers[1].send(0, Message { header: header.clone(), payloads: Vec::new(), taken: None });
                }
                world.barrier("middle")?;
                world.barrier("end")
            })
        });
        for end in ends {
            let error = end.unwrap_err().cause.to_string();
            assert!(
                error.contains("lost the connection to the process of rank 1") && error.contains(problem),
                "{error}"
            );
        }
    }
}

#[test]
fn payloads_of_other_lengths_than_announced_are_an_error() {
    let job = Job::new(2, 10);
    let ends = job.run(|_, processes| {
        launched(processes, 1, |world| {
            world.barrier("start")?;
            if world.rank() == 1 {
                let header = Header { launch: LaunchId::first(0), word: ControlMessage::RankExited(left(1)) }.write();
                job.couriers[1].send(0, Message { header, payloads: vec![Arc::new([0; 12])], taken: None });
            }
            world.barrier("middle")?;
            world.barrier("end")
        })
    });
    for end in ends {
        let error = end.unwrap_err().cause.to_string();
        assert!(error.contains("announces payloads of [12] bytes, which do not match its tensors []"), "{error}");
    }
}

/// Every rank first waits in the group that it shares with the next rank, which forms a cycle.
#[test]
fn ranks_of_several_processes_that_wait_for_each_other_are_told() {
    for (processes, each) in [(2, 1), (3, 1), (2, 2)] {
        let (job, size) = (Job::new(processes, 11), processes * each);
        let ends = job.run(|_, processes| {
            launched(processes, each, |world| {
                let rank = world.rank();
                let next = world.group(&[rank, (rank + 1) % size])?;
                let before = world.group(&[(rank + size - 1) % size, rank])?;
                next.barrier("next".into()).wait()?;
                Ok(before.barrier("before".into()).wait()?)
            })
        });
        for end in ends {
            let error = end.unwrap_err();
            let Error::Comm(CommError::Deadlock { waits }) = &error.cause else { panic!("{error}") };
            assert_eq!(waits.len(), size, "{error}");
            assert!(
                waits.iter().all(|(rank, during, other)| { *other == (rank + 1) % size && &*during.label == "next" })
            );
        }
    }
}

#[test]
fn ranks_that_wait_for_long_and_not_for_each_other_go_on() {
    let job = Job::new(3, 12);
    let ends = job.run(|_, processes| {
        launched(processes, 1, |world| {
            let (rank, all) = (world.rank(), world.all());
            // Rank 0 waits for rank 1, which waits for rank 2, which computes; then all continue in another order.
            if rank == 2 {
                std::thread::sleep(Duration::from_millis(1200));
            }
            for pair in [[1, 2], [0, 1], [2, 0]] {
                if pair.contains(&rank) {
                    world.group(&pair)?.barrier("pair".into()).wait()?;
                }
            }
            sum(world, &all, "sum", 3)
        })
    });
    ends.into_iter().for_each(|end| drop(end.unwrap()));
}
