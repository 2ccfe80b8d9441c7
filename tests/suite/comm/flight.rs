//! The flight recorder: from the ranks' files alone it is known who is at fault.

use std::path::PathBuf;
use std::process::{self, Command};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, fs};

use burn::tensor::{DType, Tensor};
use burn_dtensor::comm::{
    CommError, Communicator, Launch, LaunchError, Op, StartError, Work, World, launch,
};
use burn_dtensor::comm::{ReduceOp, ShardedTensor};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::{Error, Result};
use burn_dtensor_flight::{ExitKind, FaultKind, LaunchTrace, OpOutcome, RankTrace};

/// Ends what would hang; nobody waits for it.
const FAR: Duration = Duration::from_secs(3600);

/// A folder that is gone when this is.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static FOLDERS: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "flight-{}-{}",
            std::process::id(),
            FOLDERS.fetch_add(1, Ordering::Relaxed)
        );
        Self(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name))
    }

    /// The one launch whose files lie here.
    fn flights(&self) -> LaunchTrace {
        let mut launches = LaunchTrace::read(&self.0).unwrap();
        assert_eq!(launches.len(), 1);
        launches.remove(0)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

/// Three ranks whose programs fail: how the launch did, and what their files say.
fn fails(program: impl Fn(&World) -> Result<()> + Sync) -> (LaunchError, LaunchTrace) {
    let folder = Folder::new();
    let config = Launch::threads(3)
        .with_deadline(FAR)
        .with_flight_recorder(&folder.0);
    let error = launch(config, |world| {
        world.barrier("start")?;
        program(world)
    })
    .unwrap_err();
    assert_eq!(error.flight.as_ref(), Some(&folder.0));
    (error, folder.flights())
}

/// Ranks 0 and 1 call `right`; rank 2 does `wrong` once both have.
fn provoke(
    right: impl Fn(&World, &Communicator) -> Vec<Work<()>> + Sync,
    wrong: impl Fn(&World, &Communicator) -> Result<()> + Sync,
) -> (LaunchError, LaunchTrace) {
    let called = AtomicUsize::new(0);
    fails(|world| {
        let all = world.all();
        if world.rank() == 2 {
            while called.load(Ordering::Acquire) < 2 {
                std::thread::yield_now();
            }
            return wrong(world, &all);
        }
        let works = right(world, &all);
        called.fetch_add(1, Ordering::Release);
        works.into_iter().try_for_each(Work::wait)?;
        Ok(())
    })
}

/// The files name rank 2, as the launch does, and say why.
fn blames(why: FaultKind, text: &[&str], (error, flights): (LaunchError, LaunchTrace)) {
    let fault = flights.fault().unwrap_or_else(|| panic!("{flights}"));
    assert_eq!((fault.rank, fault.why), (2, why), "{flights}");
    assert_eq!(error.rank, 2, "{error}");
    for text in text {
        assert!(fault.text.contains(text), "{fault}");
    }
    assert!(
        flights
            .to_string()
            .lines()
            .nth(1)
            .unwrap()
            .starts_with("  at fault: rank 2 "),
        "{flights}"
    );
    let json: serde_json::Value = serde_json::from_str(&flights.to_json(3)).unwrap();
    assert_eq!(
        (&json["fault"]["rank"], &json["fault"]["why"]),
        (&2.into(), &why.name().into())
    );
    assert_eq!(json["ranks"].as_array().unwrap().len(), 3);
}

fn step(_: &World, comm: &Communicator) -> Vec<Work<()>> {
    vec![comm.barrier("step".into())]
}

/// An all-gather of a matrix that is cut along its rows.
fn gather(
    label: &str,
    dtype: DType,
    width: usize,
) -> impl Fn(&World, &Communicator) -> Vec<Work<()>> {
    move |world, comm| {
        let tensor = Tensor::<2>::ones([2, width], world.device())
            .cast(dtype)
            .into_dispatch();
        let shard = ShardedTensor {
            tensor,
            dim: 0,
            sizes: ShardSizes::Chunked(6),
        };
        vec![comm.all_gather(label.into(), vec![shard]).then(drop)]
    }
}

/// Waits for all.
fn wait(
    calls: impl Fn(&World, &Communicator) -> Vec<Work<()>>,
) -> impl Fn(&World, &Communicator) -> Result<()> {
    move |world, comm| Ok(calls(world, comm).into_iter().try_for_each(Work::wait)?)
}

#[test]
fn a_panic() {
    let ended = provoke(step, |_, _| panic!("boom"));
    let text = ended.0.to_string();
    assert!(
        text.contains("\n  rank 2 took part in barrier #0 `start` on ranks [0, 1, 2]\n"),
        "{text}"
    );
    assert!(
        text.contains("\n  what each rank did last is in "),
        "{text}"
    );
    let panicked = ended.1.rank(2).unwrap().ending.as_ref().unwrap();
    assert_eq!(
        (panicked.how, &*panicked.text),
        (ExitKind::Panicked, "boom")
    );
    blames(FaultKind::Panicked, &["panicked: boom"], ended);
}

#[test]
fn an_error() {
    blames(
        FaultKind::Failed,
        &["failed: no batch left"],
        provoke(step, |_, _| Err(Error::other("no batch left"))),
    );
}

/// Of the process, by the program of one of its ranks.
#[test]
fn an_exit() {
    const NAME: &str = "comm::flight::an_exit";
    const OWN: &str = "BURN_DTENSOR_FLIGHT_OF_AN_EXIT";
    if let Some(folder) = env::var_os(OWN) {
        let ended = launch(
            Launch::threads(3)
                .with_deadline(FAR)
                .with_flight_recorder(folder),
            |world| {
                world.barrier("start")?;
                if world.rank() == 1 {
                    process::exit(7);
                }
                world.barrier("step")
            },
        );
        panic!("{ended:?}");
    }
    let folder = Folder::new();
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command
        .args([NAME, "--exact", "--nocapture"])
        .env(OWN, &folder.0)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let flights = folder.flights();
    let fault = flights.fault().unwrap_or_else(|| panic!("{flights}"));
    assert_eq!((fault.rank, fault.why), (1, FaultKind::Exited), "{flights}");
    assert_eq!(fault.text, "exited: its program has ended the process");
    let texts = [0, 2].map(|rank| &*flights.rank(rank).unwrap().ending.as_ref().unwrap().text);
    assert_eq!(texts, ["the program of rank 1 has ended the process"; 2]);
}

#[test]
fn an_argument_that_cannot_be_right() {
    let wrong = |world: &World, comm: &Communicator| {
        let tensor = Tensor::<2>::ones([3, 3], world.device()).into_dispatch();
        comm.all_gather(
            "rows".into(),
            vec![ShardedTensor {
                tensor,
                dim: 0,
                sizes: ShardSizes::Chunked(6),
            }],
        )
        .wait()?;
        Ok(())
    };
    blames(
        FaultKind::Failed,
        &["length 3 in dimension 0"],
        provoke(step, wrong),
    );
}

/// A call too few, at the end.
#[test]
fn an_early_return() {
    let left = provoke(step, |_, _| Ok(()));
    assert!(
        left.1.waits().iter().any(|waiting| waiting.missing == [2]),
        "{}",
        left.1
    );
    blames(
        FaultKind::Left,
        &["waits for it in barrier #1 `step` on ranks [0, 1, 2]"],
        left,
    );
}

/// It is waited for, too, and came too late.
#[test]
fn a_rank_that_was_told_of_another_is_not_at_fault() {
    let told = AtomicBool::new(false);
    let ended = fails(|world| {
        while world.rank() == 1 && !told.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        if world.rank() == 2 {
            return Ok(());
        }
        let step = world.barrier("step");
        told.store(true, Ordering::Release);
        step
    });
    assert!(
        ended
            .1
            .waits()
            .iter()
            .any(|waiting| waiting.missing == [1, 2]),
        "{}",
        ended.1
    );
    blames(
        FaultKind::Left,
        &["waits for it in barrier #1 `step` on ranks [0, 1, 2]"],
        ended,
    );
}

#[test]
fn another_operation() {
    let wrong = |world: &World, comm: &Communicator| {
        let tensor = Tensor::<1>::ones([3], world.device()).into_dispatch();
        comm.all_reduce("step".into(), vec![tensor], ReduceOp::Sum)
            .wait()?;
        Ok(())
    };
    blames(
        FaultKind::Disagrees,
        &["operation all_reduce vs barrier", "[3] f32"],
        provoke(step, wrong),
    );
}

#[test]
fn another_shape() {
    let wrong = wait(gather("rows", DType::F32, 4));
    blames(
        FaultKind::Disagrees,
        &["tensor 0: shape [6, 4] vs [6, 3]"],
        provoke(gather("rows", DType::F32, 3), wrong),
    );
}

#[test]
fn another_dtype() {
    let wrong = wait(gather("rows", DType::F64, 3));
    blames(
        FaultKind::Disagrees,
        &["tensor 0: dtype f64 vs f32"],
        provoke(gather("rows", DType::F32, 3), wrong),
    );
}

#[test]
fn another_label() {
    let wrong = wait(gather("columns", DType::F32, 3));
    blames(
        FaultKind::Disagrees,
        &["label `columns` vs `rows`"],
        provoke(gather("rows", DType::F32, 3), wrong),
    );
}

/// Messages are no collectives, of which the files have all calls: what ranks were told counts.
#[test]
fn a_receive_of_another_message() {
    let send = |world: &World, comm: &Communicator| {
        let tensor = Tensor::<1>::ones([3], world.device()).into_dispatch();
        if world.rank() == 0 {
            vec![comm.send("step".into(), vec![tensor], 2, 7)]
        } else {
            vec![]
        }
    };
    let wrong = |_: &World, comm: &Communicator| {
        Ok(comm.receive("other".into(), None, 0, 7).wait().map(drop)?)
    };
    blames(
        FaultKind::Disagrees,
        &["differs: ", "label `other` vs `step`"],
        provoke(send, wrong),
    );
}

fn barriers(labels: [&'static str; 2]) -> impl Fn(&World, &Communicator) -> Vec<Work<()>> {
    move |_, comm| labels.map(|label| comm.barrier(label.into())).into()
}

#[test]
fn another_order() {
    let ended = provoke(
        barriers(["first", "second"]),
        wait(barriers(["second", "first"])),
    );
    blames(
        FaultKind::Disagrees,
        &["label `second` vs `first`", "in another order"],
        ended,
    );
}

#[test]
fn a_call_too_many_between_others() {
    let ended = provoke(step, wait(barriers(["more", "step"])));
    blames(
        FaultKind::Disagrees,
        &["label `more` vs `step`", "it makes one call too many"],
        ended,
    );
}

#[test]
fn a_call_too_few_between_others() {
    let ended = provoke(
        barriers(["first", "second"]),
        wait(|_, comm| vec![comm.barrier("second".into())]),
    );
    blames(
        FaultKind::Disagrees,
        &["label `second` vs `first`", "it has left one call out"],
        ended,
    );
}

/// The launch names the first of those that the call waits for, since it cannot tell a call too
/// many from returns that are too early. Here most have returned.
#[test]
fn a_call_too_many_at_the_end() {
    let (error, flights) = fails(|world| {
        if world.rank() == 2 {
            world.barrier("more")
        } else {
            Ok(())
        }
    });
    let Error::Comm(CommError::RankReturned {
        rank: 0 | 1,
        during,
    }) = &error.cause
    else {
        panic!("{error}")
    };
    assert_eq!(&*during.label, "more");
    let fault = flights.fault().unwrap();
    assert_eq!(
        (fault.rank, fault.why),
        (2, FaultKind::Surplus),
        "{flights}"
    );
    assert!(
        fault
            .text
            .contains("a call too many: ranks [0, 1] have returned without it"),
        "{fault}"
    );
}

/// Of a circle none is more at fault than another: the launch names the one whose wait closed it,
/// the files the one that noted last that it waits. Both name all three.
#[test]
fn a_deadlock() {
    let (error, flights) = fails(|world| {
        let pairs = [[0, 1], [1, 2], [2, 0]];
        // Every rank begins with the pair that it shares with the next.
        world
            .group(&pairs[world.rank()])?
            .barrier("right".into())
            .wait()?;
        world
            .group(&pairs[(world.rank() + 2) % 3])?
            .barrier("left".into())
            .wait()?;
        Ok(())
    });
    let Error::Comm(CommError::Deadlock { waits }) = &error.cause else {
        panic!("{error}")
    };
    assert_eq!(waits.len(), 3);
    let fault = flights.fault().unwrap();
    assert_eq!(fault.why, FaultKind::Deadlock, "{flights}");
    for rank in 0..3 {
        let (next, ranks) = ((rank + 1) % 3, [[0, 1], [1, 2], [2, 0]][rank]);
        let waits =
            format!("rank {rank} waits in barrier #0 `right` on ranks {ranks:?} for rank {next}");
        assert!(fault.text.contains(&waits), "{fault}");
    }
}

/// Ranks 0 and 1 give up waiting for rank 2, which does `then` afterwards.
fn late(then: impl Fn(&World) -> Result<()> + Sync) -> (LaunchError, LaunchTrace) {
    let (called, given_up) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let until_both = |count: &AtomicUsize| {
        while count.load(Ordering::Acquire) < 2 {
            std::thread::yield_now();
        }
    };
    fails(|world| {
        if world.rank() == 2 {
            until_both(&given_up);
            return then(world);
        }
        let step = world.all().barrier("step".into());
        called.fetch_add(1, Ordering::Release);
        until_both(&called);
        let result = step.wait_timeout(Duration::from_millis(100));
        given_up.fetch_add(1, Ordering::Release);
        Ok(result?)
    })
}

#[test]
fn a_deadline() {
    let ended = late(|world| world.barrier("step"));
    assert!(
        matches!(
            ended.0.cause,
            Error::Comm(CommError::DeadlineExceeded { .. })
        ),
        "{}",
        ended.0
    );
    blames(
        FaultKind::Absent,
        &[
            "is missing; last operation: barrier #0 `start`",
            "wait for it, first in barrier #1 `step`",
        ],
        ended,
    );
}

/// What a rank calls when it has heard of a failure proves nothing.
#[test]
fn a_call_after_a_failure_is_no_disagreement() {
    let ended = late(|world| world.barrier("clean up"));
    let refused = ended.1.rank(2).unwrap().operations.last().unwrap();
    assert_eq!(
        (&*refused.id.label, refused.over.unwrap().1),
        ("clean up", OpOutcome::Refused)
    );
    blames(
        FaultKind::Absent,
        &["is missing; last operation: barrier #0 `start`"],
        ended,
    );
}

/// Of two callers the one that came last is at fault to the launch; once a third has called, the
/// files have a majority.
#[test]
fn the_majority_counts_also_of_those_who_called_after_the_failure() {
    let (first, second) = (AtomicBool::new(false), AtomicBool::new(false));
    let until = |flag: &AtomicBool| {
        while !flag.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    };
    let (error, flights) = fails(|world| {
        let all = world.all();
        match world.rank() {
            2 => {
                let work = all.barrier("wrong".into());
                first.store(true, Ordering::Release);
                Ok(work.wait()?)
            }
            1 => {
                until(&first);
                let work = all.barrier("step".into());
                second.store(true, Ordering::Release);
                Ok(work.wait()?)
            }
            _ => {
                until(&second);
                world.barrier("step")
            }
        }
    });
    assert_eq!(error.rank, 1, "{error}");
    let fault = flights.fault().unwrap();
    assert_eq!(
        (fault.rank, fault.why),
        (2, FaultKind::Disagrees),
        "{flights}"
    );
}

#[test]
fn a_program_that_is_well_has_no_fault() {
    let folder = Folder::new();
    launch(
        Launch::threads(3).with_flight_recorder(&folder.0),
        |world| {
            let all = world.all();
            let tensor = || Tensor::<2>::ones([2, 5], world.device()).into_dispatch();
            let sum = all.all_reduce("sum".into(), vec![tensor()], ReduceOp::Sum);
            drop(all.duplicate("second").barrier("dropped".into()));
            sum.wait()?;
            // From whoever comes first, and in the order in which they came.
            if world.rank() == 0 {
                let froms: Vec<_> = (0..2)
                    .map(|_| Ok(all.receive("any".into(), None, None, 7).wait()?.from))
                    .collect::<Result<_>>()?;
                let flight = world.ledger().flight();
                let received = flight
                    .operations
                    .iter()
                    .filter(|operation| operation.id.op == Op::Receive);
                let noted: Vec<_> = received
                    .map(|operation| operation.over.unwrap().1)
                    .collect();
                assert_eq!(
                    noted,
                    froms
                        .into_iter()
                        .map(|from| OpOutcome::Done(Some(from)))
                        .collect::<Vec<_>>()
                );
            } else {
                all.send("any".into(), vec![tensor()], 0, 7).wait()?;
            }
            world.barrier("end")
        },
    )
    .unwrap();
    let flights = folder.flights();
    assert_eq!(flights.fault(), None, "{flights}");
    assert!(
        flights
            .to_string()
            .contains("\n  every rank has returned\n"),
        "{flights}"
    );
    let sum = &flights.rank(1).unwrap().operations[0];
    assert_eq!(
        sum.to_string(),
        "all_reduce #0 `sum` on ranks [0, 1, 2]: [2, 5] f32"
    );
    assert_eq!((sum.reduction, sum.bytes, sum.index), (Some("sum"), 40, 0));
    assert!(sum.waited.is_some() && matches!(sum.over, Some((_, OpOutcome::Done(Some(_))))));
    let dropped = &flights.rank(1).unwrap().operations[1];
    assert_eq!(
        (&*dropped.channel, dropped.over.unwrap().1, dropped.waited),
        ("second", OpOutcome::Dropped, None)
    );
    // Messages have numbers of their own.
    let last = flights.rank(0).unwrap().operations.last().unwrap();
    assert_eq!(last.id.to_string(), "barrier #1 `end` on ranks [0, 1, 2]");
    let sent = flights
        .rank(2)
        .unwrap()
        .operations
        .iter()
        .find(|operation| operation.id.op == Op::Send)
        .unwrap();
    assert_eq!(
        sent.to_string(),
        "send #0 `any` on ranks [0, 1, 2] to rank 0, tag 7: [2, 5] f32"
    );
}

/// While a rank waits, its files say for whom.
#[test]
fn a_program_that_runs_says_who_is_waited_for() {
    let folder = Folder::new();
    launch(
        Launch::threads(3).with_flight_recorder(&folder.0),
        |world| {
            if world.rank() == 1 {
                let waits = |flights: &LaunchTrace| {
                    flights
                        .waits()
                        .iter()
                        .filter(|waiting| waiting.missing == [1])
                        .count()
                };
                let flights = loop {
                    let flights = folder.flights();
                    if flights.ranks.len() == 3 && waits(&flights) == 2 {
                        break flights;
                    }
                };
                let fault = flights.fault().unwrap();
                assert_eq!((fault.rank, fault.why), (1, FaultKind::Absent), "{flights}");
                assert!(
                    fault
                        .text
                        .contains("ranks [0, 2] wait for it, first in barrier #0 `step`"),
                    "{fault}"
                );
            }
            world.barrier("step")
        },
    )
    .unwrap();
}

#[test]
fn a_folder_that_cannot_be_made_fails_the_launch_at_once() {
    let folder = Folder::new();
    fs::write(&folder.0, "a file").unwrap();
    let config = Launch::threads(3)
        .with_deadline(FAR)
        .with_flight_recorder(folder.0.join("inside"));
    let error = launch(config, |world| world.barrier("never")).unwrap_err();
    let Error::Start(StartError::Flight { path, .. }) = &error.cause else {
        panic!("{error}")
    };
    assert!(
        path.starts_with(&folder.0) && error.to_string().contains("Name a folder"),
        "{error}"
    );
    fs::remove_file(&folder.0).unwrap();
}

#[test]
fn the_files_say_what_the_ledger_does() {
    let folder = Folder::new();
    let own = launch(
        Launch::threads(2).with_flight_recorder(&folder.0),
        |world| {
            (0..2000).try_for_each(|step| world.barrier(&*format!("step {step}")))?;
            Ok((world.ledger().flight(), world.ledger().recent()))
        },
    )
    .unwrap();
    for (rank, (flight, entries)) in own {
        let mut file = RankTrace::read(folder.0.join(flight.launch.file_name(rank))).unwrap();
        assert_eq!(
            file.ending.take().map(|ending| ending.how),
            Some(ExitKind::Returned)
        );
        assert_eq!(
            (file, flight.posted, entries.len()),
            (flight.clone(), 2000, 1024)
        );
        let labels = flight
            .operations
            .iter()
            .map(|operation| operation.id.label.clone());
        assert!(labels.eq(entries.iter().map(|entry| entry.label.clone())));
    }
}
