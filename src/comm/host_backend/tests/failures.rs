//! A failure that ends a launch in one process ends it in all processes, with the same error.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use burn::tensor::{DType, Tensor};
use burn_dtensor_flight::LaunchId;
use parking_lot::Mutex;

use super::super::ProcessJob;
use crate::comm::backend::{Backend, CallSignature, ShardSignature, TensorSignature};
use crate::comm::control::match_table::DataMode;
use crate::comm::transport::header::{
    ControlMessage, Header, KnownSignatures, MessageId, PayloadDesc, RemoteGroupId,
    RemoteGroupInfo, SentSignature,
};
use crate::comm::transport::peer_processes::PayloadData;
use crate::comm::transport::{Message, Transport};
use crate::comm::{
    Call, CommError, Communicator, Launch, LaunchError, Op, RankReport, ReduceOp, ShardedTensor,
    TensorMeta, World, launch,
};
use crate::placement::ShardSizes;
use crate::testing::LoopbackJob as Job;
use crate::{Error, Result};

const FAR: Duration = Duration::from_secs(3600);

/// Runs `program` in one process and returns the outcome of its launch.
#[expect(clippy::result_large_err, reason = "made once per test")]
fn launched<T: Send>(
    processes: &ProcessJob,
    each: usize,
    program: impl Fn(&World) -> Result<T> + Sync,
) -> Result<Vec<(usize, T)>, LaunchError> {
    launch(
        Launch::on_backend(processes.backend(each)).with_deadline(FAR),
        program,
    )
}

fn sum(world: &World, comm: &Communicator, label: &str, len: usize) -> Result<()> {
    let tensor = Tensor::<1>::ones([len], world.device()).into_dispatch();
    Ok(comm
        .all_reduce(label.into(), vec![tensor], ReduceOp::Sum)
        .wait()
        .map(|_| ())?)
}

fn left(rank: usize) -> RankReport {
    RankReport {
        rank,
        activity: "finished".into(),
        error: None,
        at: None,
    }
}

/// Lets one of four ranks, in two processes, call `wrong` while the others reduce; each rank takes
/// this role once. Checks the error of each launch and of each other rank.
fn provoke(
    wrong: impl Fn(&World, &Communicator) -> Result<()> + Sync,
    is_it: impl Fn(&CommError, usize) -> bool,
) {
    for culprit in 0..4 {
        let job = Job::new(2, 40 + culprit as u64);
        let ends = job.run(|_, processes| {
            launched(processes, 2, |world| {
                let comm = world.all();
                sum(world, &comm, "before", 3)?;
                if world.rank() == culprit {
                    wrong(world, &comm)
                } else {
                    sum(world, &comm, "sum", 3)
                }
            })
        });
        let causes: Vec<_> = ends
            .into_iter()
            .map(|end| end.expect_err("a rank has failed"))
            .collect();
        for (process, error) in causes.iter().enumerate() {
            // Each process has the same report of all ranks, which process 0 prints.
            assert_eq!(
                error.to_string(),
                causes[0].to_string(),
                "rank {culprit}, process {process}"
            );
            assert_eq!(
                (error.others.len(), error.is_reported_by_other_process),
                (3, process > 0),
                "{error}"
            );
            for other in error.others.iter().filter(|other| other.rank != culprit) {
                let Some(Error::Comm(told)) = &other.error else {
                    panic!("rank {culprit}: {error}")
                };
                assert!(
                    is_it(told, culprit),
                    "rank {culprit}: rank {} received {told}",
                    other.rank
                );
            }
        }
    }
}

#[test]
fn a_panic_in_any_process_ends_all() {
    provoke(
        |_, _| panic!("boom"),
        |error, culprit| {
            let CommError::RankPanicked {
                rank,
                message,
                during: Some(id),
            } = error
            else {
                return false;
            };
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
            CommError::Mismatch {
                rank,
                other,
                differs,
                ..
            } => {
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
            Ok(comm
                .barrier("late".into())
                .wait_timeout(Duration::from_millis(20))?)
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
        assert!(
            causes.iter().all(|error| error.cause.to_string() == first),
            "{causes:?}"
        );
    }
}

#[test]
fn a_launch_that_fails_elsewhere_fails_here_though_all_ranks_here_succeed() {
    let job = Job::new(2, 5);
    let ends = job.run(|_, processes| {
        launched(processes, 1, |world| {
            if world.rank() == 1 {
                Err(Error::other("alone"))
            } else {
                Ok(())
            }
        })
    });
    for end in ends {
        let error = end.unwrap_err();
        assert_eq!(
            (error.rank, error.cause.to_string().contains("alone")),
            (1, true),
            "{error}"
        );
    }
}

/// If all ranks have handled a failure, the launch succeeds in all processes.
#[test]
fn a_failure_that_every_rank_takes_is_no_end() {
    let job = Job::new(2, 6);
    let ends = job.run(|_, processes| {
        launched(processes, 1, |world| {
            Ok(sum(world, &world.all(), "sum", 3 + world.rank())
                .unwrap_err()
                .to_string())
        })
    });
    let told: Vec<_> = ends
        .into_iter()
        .map(|end| end.unwrap().remove(0).1)
        .collect();
    assert!(
        told[0].contains("disagree") && told[0] == told[1],
        "{told:?}"
    );
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
        for (process, end) in ends
            .into_iter()
            .enumerate()
            .filter(|(process, _)| *process != lost)
        {
            let error = end.unwrap_err();
            let Error::Comm(CommError::Disconnected { rank, .. }) = &error.cause else {
                panic!("{process}: {error}")
            };
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

/// After a failure, rank 1 stays in a loop of its own, outside collectives. The launches of the
/// other processes end, and their report names it.
#[test]
fn a_rank_that_is_stuck_in_its_own_code_ends_no_launch_but_its_own() {
    let job = Job::new(3, 9);
    let (go, told) = mpsc::channel::<()>();
    let told = Mutex::new(told);
    let left = AtomicUsize::new(2);
    let go = Mutex::new(Some(go));
    let ends = job.run(|process, processes| {
        let config =
            Launch::on_backend(processes.backend(1)).with_deadline(Duration::from_millis(20));
        let end = launch(config, |world| match world.rank() {
            0 => Err(Error::other("boom")),
            1 => {
                // Bounded, so that launches that wait for it end, too.
                let _ = told.lock().recv_timeout(Duration::from_secs(60));
                Ok(())
            }
            _ => Ok(()),
        });
        if process != 1 && left.fetch_sub(1, Ordering::SeqCst) == 1 {
            drop(go.lock().take());
        }
        end
    });
    let stuck = CommError::StillRunning {
        rank: 1,
        deadline: Duration::from_millis(20),
    }
    .to_string();
    for process in [0, 2] {
        let error = ends[process].as_ref().unwrap_err();
        assert_eq!(
            (error.rank, error.is_reported_by_other_process),
            (0, process == 2)
        );
        let report = error
            .others
            .iter()
            .find(|report| report.rank == 1)
            .expect("every rank has a report");
        assert_eq!(
            report.error.as_ref().map(ToString::to_string),
            Some(stuck.clone())
        );
        assert_eq!(report.activity, "computing, before any collective");
    }
    let others = &ends[1].as_ref().unwrap_err().others;
    assert!(
        others.iter().all(|report| report.error.is_none()),
        "the others have ended: {others:?}"
    );
}

/// Rank 1 drops a deferred gather and ends. Rank 0 then still needs its shard, which never arrives.
#[test]
fn a_process_that_is_lost_before_it_has_sent_what_its_rank_dropped_ends_the_others() {
    let job = Job::new(2, 23);
    let ends = job.run(|process, processes| {
        launched(processes, 1, |world| {
            let tensor = Tensor::<1>::ones([50_000], world.device()).into_dispatch();
            let shard = ShardedTensor {
                tensor,
                dim: 0,
                sizes: ShardSizes::Chunked(100_000),
            };
            let gathered = world
                .all()
                .all_gather(Call::new("dropped by one").with_deferred(), vec![shard]);
            if process == 1 {
                return Ok(());
            }
            let backend = processes.state.lock().backends().next().unwrap();
            while backend.activity(1) != "finished" {
                std::thread::yield_now();
            }
            job.lose(1);
            let error = gathered
                .wait()
                .expect_err("the other rank's shard never arrives");
            assert!(
                matches!(error, CommError::Disconnected { rank: 1, .. }),
                "{error}"
            );
            Ok(())
        })
    });
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
}

/// As among threads, where each call finds the failure.
#[test]
fn a_rank_that_only_sends_to_other_processes_is_told() {
    let sent = Mutex::new(Ok(()));
    Job::new(2, 24).run(|process, processes| {
        launched(processes, 1, |world| {
            if process == 1 {
                return Err(Error::other("disk full"));
            }
            world
                .barrier("until it has failed")
                .expect_err("it has failed");
            let tensor = Tensor::<1>::ones([2], world.device()).into_dispatch();
            *sent.lock() = world.all().send("late".into(), vec![tensor], 1, 0).wait();
            Ok(())
        })
        .expect_err("a rank has failed")
    });
    let sent = sent.into_inner();
    assert!(
        matches!(sent, Err(CommError::RankFailed { rank: 1, .. })),
        "{sent:?}"
    );
}

/// If a process receives an invalid header, which no backend sends, the error names the sender and
/// no thread panics.
#[test]
fn a_header_that_cannot_be_right_is_an_error() {
    let signature = || CallSignature::new(Op::Barrier, &Call::new("end"), Vec::new());
    let of = |ranks: &[usize], member| RemoteGroupInfo {
        ranks: ranks.to_vec(),
        name: String::new(),
        member,
    };
    let channel = |introduction| RemoteGroupId {
        number: 1000,
        introduction,
    };
    let join_in = |mode, introduction, seq, signature: &CallSignature, contents| {
        let channel = channel(introduction);
        let signature = SentSignature::new(signature);
        let message = ControlMessage::Joined {
            channel,
            seq,
            signature,
            mode,
            contents,
        };
        Header {
            launch: LaunchId::first(0),
            message,
        }
        .write()
    };
    let join_with = |introduction, seq, signature: &_, contents| {
        join_in(DataMode::Eager, introduction, seq, signature, contents)
    };
    let join =
        |introduction, seq| join_with(introduction, seq, &signature(), PayloadDesc::default());
    // Tensors without elements, which have no payload.
    let data = |recipients: &[usize], count: usize| {
        let meta = TensorMeta {
            shape: [0, 3].into(),
            dtype: DType::F32,
        };
        PayloadDesc {
            recipients: recipients.to_vec(),
            tensors: vec![meta; count],
        }
    };
    let call = |op, dim| {
        let sharding = Some(ShardSignature {
            dim,
            uneven_sizes: None,
        });
        let tensor = TensorSignature {
            shape: [0, 3].into(),
            dtype: DType::F32,
            sharding,
            to: None,
        };
        CallSignature::new(op, &Call::new("end"), vec![tensor])
    };
    let call_with = |op, dim, recipients: &[usize], count| {
        join_with(
            Some(of(&[1, 0], 0)),
            0,
            &call(op, dim),
            data(recipients, count),
        )
    };
    // The sum of the bytes overflows, and that of no tensor.
    let huge = {
        let tensor = TensorSignature {
            shape: [usize::MAX / 4].into(),
            dtype: DType::F32,
            sharding: None,
            to: None,
        };
        CallSignature::new(Op::AllReduce, &Call::new("end"), vec![tensor; 2])
    };
    let message_with = |to, contents, exchanged| {
        let channel = channel(Some(of(&[0, 1], 1)));
        let message = ControlMessage::Sent {
            channel,
            to,
            tag: 0,
            signature: signature(),
            contents,
            exchanged,
        };
        Header {
            launch: LaunchId::first(0),
            message,
        }
        .write()
    };
    let message_of = |to, contents| message_with(to, contents, None);
    let message = |to| message_of(to, PayloadDesc::default());
    let write = |message: ControlMessage| {
        Header {
            launch: LaunchId::first(0),
            message,
        }
        .write()
    };
    // A call, and its data in a message of its own.
    let call_then = |op, recipients: &[usize], count| {
        let contents = data(recipients, count);
        vec![
            join_in(
                DataMode::Deferred,
                Some(of(&[1, 0], 0)),
                0,
                &call(op, 0),
                PayloadDesc::default(),
            ),
            write(ControlMessage::Data {
                channel: 1000,
                seq: 0,
                contents,
            }),
        ]
    };
    let mut known = KnownSignatures::default();
    let [_, known] = [(); 2].map(|()| SentSignature::new(&signature()).abbreviated(&mut known));
    let known = write(ControlMessage::Joined {
        channel: channel(Some(of(&[0, 1], 1))),
        seq: 0,
        signature: known,
        mode: DataMode::Eager,
        contents: PayloadDesc::default(),
    });
    let wrong = [
        (Vec::new(), "of 0 bytes cannot be decoded"),
        (vec![0, 99, 1, 2, 3], "cannot be decoded"),
        (join(None, 0), "it has not introduced channel 1000"),
        (
            join(Some(of(&[0, 1], 0)), 0),
            "it called as invalid member 0 of a group of ranks [0, 1]",
        ),
        (
            join(Some(of(&[0, 1], 7)), 0),
            "it called as invalid member 7",
        ),
        (join(Some(of(&[0, 9], 1)), 0), "of a group of ranks [0, 9]"),
        (
            join(Some(of(&[1, 0], 0)), 5),
            "it sent call 5 of a group where call 0 is next",
        ),
        (known, "it has not sent the signature of its call"),
        (
            write(ControlMessage::Pull {
                channel: 0,
                seq: 7,
                wanted: true,
            }),
            "it requested data that was not offered in call 7",
        ),
        (
            write(ControlMessage::Data {
                channel: 1000,
                seq: 0,
                contents: PayloadDesc::default(),
            }),
            "it has not introduced channel 1000",
        ),
        (message(2), "it sent a message to member 2 of a group of 2"),
        (
            message_of(0, data(&[], 1)),
            "it sent a message whose data is not that of its signature",
        ),
        (
            message_with(0, PayloadDesc::default(), Some(0)),
            "it exchanges a message, which no rank of this process does",
        ),
        (
            write(ControlMessage::MessageTaken(MessageId {
                process: 2,
                number: 0,
            })),
            "it received a message of process 2, which does not exist",
        ),
        (
            write(ControlMessage::MessageOrdered(MessageId {
                process: 1,
                number: 0,
            })),
            "it ordered a message, which is up to another process",
        ),
        (
            write(ControlMessage::ExchangeOrdered {
                owner: 1,
                channel: 0,
                seq: 0,
                is_started: true,
            }),
            "it ordered an exchange, which is up to another process",
        ),
        (
            join_with(Some(of(&[1, 0], 0)), 0, &huge, PayloadDesc::default()),
            "it called with a signature that does not fit a group of 2",
        ),
        (
            call_with(Op::AllGather, 2, &[], 1),
            "it called with a signature that does not fit a group of 2",
        ),
        (
            call_with(Op::AllGather, 0, &[], 0),
            "data for members [] of 0 tensors in call 0 of a group, all_gather",
        ),
        (
            call_with(Op::AllGather, 1, &[], 1),
            "data for members [] of 1 tensors in call 0 of a group, all_gather",
        ),
        (
            call_with(Op::AllGather, 0, &[1], 1),
            "data for members [1] of 1 tensors",
        ),
        (
            call_with(Op::ReduceScatter, 0, &[0], 1),
            "data for members [0] of 1 tensors",
        ),
        (
            call_with(Op::ReduceScatter, 0, &[1, 1], 2),
            "data for members [1, 1] of 2 tensors",
        ),
        (
            call_with(Op::AllReduce, 0, &[1, 1], 2),
            "data for members [1, 1] of 2 tensors",
        ),
        (
            call_with(Op::AllReduce, 0, &[1], 0),
            "data for members [1] of 0 tensors",
        ),
        (
            call_with(Op::Scatter, 0, &[1], 1),
            "data for members [1] of 1 tensors",
        ),
        (
            call_with(Op::AllToAllList, 0, &[], 0),
            "data for members [] of 0 tensors",
        ),
        (
            write(ControlMessage::RankExited {
                report: left(0),
                exchanges: false,
            }),
            "it reported the exit of rank 0 of another process",
        ),
    ];
    let late = [
        (
            call_then(Op::AllGather, &[], 0),
            "data for members [] of 0 tensors in call 0 of a group, all_gather",
        ),
        (
            call_then(Op::AllReduce, &[1, 1], 2),
            "data for members [1, 1] of 2 tensors in call 0 of a group, all_reduce",
        ),
    ];
    for (headers, problem) in wrong
        .map(|(header, problem)| (vec![header], problem))
        .into_iter()
        .chain(late)
    {
        let job = Job::new(2, 9);
        let ends = job.run(|_, processes| {
            launched(processes, 1, |world| {
                world.barrier("start")?;
                if world.rank() == 1 {
                    for header in headers.clone() {
                        job.transports[1].send(
                            0,
                            Message {
                                header,
                                payloads: Vec::new(),
                                taken: None,
                            },
                        );
                    }
                }
                world.barrier("middle")?;
                world.barrier("end")
            })
        });
        for end in ends {
            let error = end.unwrap_err().cause.to_string();
            assert!(
                error.contains("the process of rank 1 sent an invalid message: ")
                    && error.contains(problem),
                "expected `{problem}`: {error}"
            );
        }
    }
}

/// The first message of process 1 arrives before the launch begins in process 0, or during it.
#[test]
fn a_process_of_another_version_is_named() {
    for is_early in [true, false] {
        let job = Job::new(2, 9);
        let send = || {
            let header = b"9.9.9+7\nwhatever follows".to_vec();
            job.transports[1].send(
                0,
                Message {
                    header,
                    payloads: Vec::new(),
                    taken: None,
                },
            );
        };
        if is_early {
            send();
            while job.processes[0].state.lock().headers[1] == 0 {
                std::thread::yield_now();
            }
        }
        let ends = job.run(|process, processes| {
            launched(processes, 1, |world| {
                if !is_early {
                    world.barrier("start")?;
                    if process == 1 {
                        send();
                    }
                }
                world.barrier("middle")?;
                world.barrier("end")
            })
        });
        for end in ends {
            let error = end.unwrap_err().cause;
            assert!(
                matches!(error, Error::Comm(CommError::Protocol { rank: 1, .. })),
                "{error}"
            );
            let text = "has version `9.9.9+7`, but this process has version `";
            assert!(error.to_string().contains(text), "{error}");
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
                let header = Header {
                    launch: LaunchId::first(0),
                    message: ControlMessage::RankExited {
                        report: left(1),
                        exchanges: false,
                    },
                }
                .write();
                job.transports[1].send(
                    0,
                    Message {
                        header,
                        payloads: vec![Arc::new([0; 12])],
                        taken: None,
                    },
                );
            }
            world.barrier("middle")?;
            world.barrier("end")
        })
    });
    for end in ends {
        let error = end.unwrap_err().cause.to_string();
        assert!(
            error.contains("announces payloads of [12] bytes, which do not match its tensors []"),
            "{error}"
        );
    }
}

/// Every rank first waits in the group that it shares with the next rank, which forms a cycle.
#[test]
fn ranks_of_several_processes_that_wait_for_each_other_are_told() {
    for (processes, each) in [(2, 1), (3, 1), (2, 2)] {
        let job = Job::new(processes, 11);
        let size = processes * each;
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
            let Error::Comm(CommError::Deadlock { waits }) = &error.cause else {
                panic!("{error}")
            };
            assert_eq!(waits.len(), size, "{error}");
            assert!(waits.iter().all(|(rank, during, other)| {
                *other == (rank + 1) % size && &*during.label == "next"
            }));
        }
    }
}

#[test]
fn ranks_that_wait_for_long_and_not_for_each_other_go_on() {
    let job = Job::new(3, 12);
    let ends = job.run(|_, processes| {
        launched(processes, 1, |world| {
            let rank = world.rank();
            let all = world.all();
            // Rank 0 waits for rank 1, which waits for rank 2, which computes; then all continue in
            // another order.
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

struct Unreadable;

impl AsRef<[u8]> for Unreadable {
    fn as_ref(&self) -> &[u8] {
        panic!("the device is lost")
    }
}

#[test]
fn a_device_that_cannot_be_read_fails_its_rank() {
    let ends = Job::new(2, 31).run(|process, processes| {
        launch(Launch::on_backend(processes.backend(1)), |world| {
            world.barrier("both have begun")?;
            if process == 1 {
                let backend = processes
                    .state
                    .lock()
                    .backends()
                    .next()
                    .expect("the launch has one");
                let device_of = Some(world.rank());
                let data = PayloadData {
                    payloads: vec![Arc::new(Unreadable)],
                    device_of,
                    ..PayloadData::default()
                };
                backend.send_data(0, 0, 0, data);
            }
            (0..100_000).try_for_each(|_| world.barrier("until the device is lost"))
        })
    });
    for end in ends {
        let cause = end.expect_err("a rank has failed").cause;
        let Error::Comm(CommError::RankPanicked {
            rank: 1, message, ..
        }) = &cause
        else {
            panic!("{cause}")
        };
        assert_eq!(message, "the device is lost");
    }
}
