//! Processes that are killed or stopped, where MPI goes on without them, or exit: the others are
//! told which, and go on. The flight files tell it too.

use std::process::{self, Command};
use std::time::{Duration, Instant};

use burn_dtensor::Result;
use burn_dtensor::comm::{CommError, Launch, World, launch};
use burn_dtensor::testing::ProcessTest;
use burn_dtensor_flight::{FaultKind, LaunchTrace, ProcessState};

use super::folder::Folder;
use super::operation::{Arguments, OPERATIONS, Operation};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Killed,
    Stopped,
    /// By code of the program.
    Exits,
}

impl Fault {
    /// Does it to this process.
    fn strike(self) -> ! {
        let this = process::id();
        let command = match self {
            Self::Killed => format!("kill -KILL {this}"),
            // The launcher waits for it: it is killed long after the others miss it.
            Self::Stopped => format!("(sleep 10; kill -KILL {this}) & kill -STOP {this}"),
            Self::Exits => process::exit(0),
        };
        drop(Command::new("sh").args(["-c", &command]).status());
        loop {
            std::thread::park();
        }
    }
}

/// Rank 1 of 3 is struck before its second call; the others are told, in that call or the next, and
/// go on.
fn program(world: &World, operation: Operation, fault: Fault) -> Result<Duration> {
    let all = world.all();
    let first = operation.call(world, &all, Arguments::new("first"));
    if world.rank() == 1 {
        first?;
        fault.strike();
    }
    let start = Instant::now();
    // Rank 1 may be gone before others are through with the first; a send, or a root's part, may be
    // over before it is.
    let second = first.and_then(|()| operation.call(world, &all, Arguments::new("second")));
    let told = second.and_then(|()| all.barrier("end".into()).wait());
    let took = start.elapsed();
    match told.expect_err("rank 1 is gone") {
        CommError::Disconnected { rank: 1, .. } => {}
        CommError::RankReturned { rank: 1, .. } if fault == Fault::Exits => {}
        error => panic!("{fault:?} in {operation:?}: {error}"),
    }
    let left = world.shrink()?;
    assert_eq!(left.ranks_before(), Some(&[0, 2][..]));
    operation.call(&left, &left.all(), Arguments::new("those that are left"))?;
    Ok(took)
}

/// Whoever reads the files is told of rank 1, too.
fn check_files(files: &Folder, fault: Fault, operation: Operation) {
    let launches = LaunchTrace::read(files.path()).unwrap();
    // The second is that of those that are left.
    assert_eq!(
        launches
            .iter()
            .map(|flights| flights.size)
            .collect::<Vec<_>>(),
        [3, 2]
    );
    let told = launches[0]
        .fault()
        .unwrap_or_else(|| panic!("{fault:?} in {operation:?}: {}", launches[0]));
    let is_expected = match fault {
        Fault::Exits => told.why == FaultKind::Exited,
        // On another host nobody knows.
        _ if launches[0].life(1) == ProcessState::Unknown => told.why == FaultKind::Absent,
        Fault::Killed => told.why == FaultKind::Gone,
        Fault::Stopped => told.why == FaultKind::Stopped,
    };
    assert!(
        told.rank == 1 && is_expected,
        "{fault:?} in {operation:?}: {}",
        launches[0]
    );
}

fn strikes(fault: Fault, operations: impl IntoIterator<Item = Operation>) {
    for operation in operations {
        let test = ProcessTest::new(3);
        // One that exits takes leave, whatever the library.
        let test = match fault {
            Fault::Exits => Some(test),
            Fault::Killed => test.with_fault_tolerance(),
            Fault::Stopped => test.with_failure_detection(),
        };
        let Some(test) = test else { return };
        let text = test.run(|| {
            let files = Folder::of_all("flights");
            let config = Launch::from_env(3)
                .unwrap()
                .with_flight_recorder(files.path());
            let ends = launch(config, |world| program(world, operation, fault));
            for (rank, took) in
                ends.unwrap_or_else(|error| panic!("{fault:?} in {operation:?}: {error}"))
            {
                check_files(&files, fault, operation);
                println!("rank {rank} was told after {took:?}");
            }
        });
        let Some(text) = text else { return };
        let told = text
            .lines()
            .filter_map(|line| Some(line.split_once(" was told after ")?.1))
            .collect::<Vec<_>>();
        println!("{fault:?} in {operation:?}: told after {told:?}");
        assert_eq!(told.len(), 2, "{text}");
    }
}

/// One of each kind: of all ranks, reducing, of two ranks, and without data.
const SOME: [Operation; 4] = [
    Operation::AllGather,
    Operation::ReduceScatter,
    Operation::Messages,
    Operation::Barrier,
];

/// With `LONG_TESTS` in every operation: each starts three processes, which takes seconds.
#[test]
fn a_process_that_is_killed_in_any_operation_is_told() {
    strikes(
        Fault::Killed,
        if crate::effort::is_long() {
            OPERATIONS.to_vec()
        } else {
            SOME.to_vec()
        },
    );
}

/// With `LONG_TESTS` in several operations: the failure detector takes ten seconds each time and
/// does not depend on them.
#[test]
fn a_process_that_is_stopped_is_told() {
    strikes(
        Fault::Stopped,
        if crate::effort::is_long() {
            SOME.to_vec()
        } else {
            vec![Operation::AllGather]
        },
    );
}

#[test]
fn a_process_that_exits_is_told() {
    strikes(Fault::Exits, SOME);
}

/// Of the ranks of a process, the one whose program has ended it is at fault.
#[test]
fn a_process_of_several_ranks_that_exits_is_told() {
    ProcessTest::new(2).run(|| {
        // What has been launched before must not come in between when the process ends.
        launch(Launch::threads(1), |_| Ok(())).unwrap();
        let files = Folder::of_all("flights");
        let config = Launch::from_env(4)
            .unwrap()
            .with_flight_recorder(files.path());
        let ends = launch(config, |world| {
            let first = world.barrier("first");
            if world.rank() == 3 {
                first?;
                Fault::Exits.strike();
            }
            // The exit may end the process before rank 2 has told the other process of its first.
            first
                .and_then(|()| world.barrier("second"))
                .expect_err("rank 3 is gone");
            world.shrink()?.barrier("those that are left")
        });
        assert_eq!(ends.unwrap().len(), 2);
        let flights = LaunchTrace::read(files.path()).unwrap().remove(0);
        let fault = flights.fault().unwrap_or_else(|| panic!("{flights}"));
        assert_eq!((fault.rank, fault.why), (3, FaultKind::Exited), "{flights}");
        let taken_along = flights.rank(2).unwrap().ending.as_ref().unwrap();
        assert_eq!(
            taken_along.text,
            "the program of rank 3 has ended the process"
        );
    });
}
