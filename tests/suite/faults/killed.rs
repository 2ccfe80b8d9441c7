//! Processes that are killed or stopped, where MPI goes on without them, or exit: the others are told which, and go on.

use std::process::{self, Command};
use std::time::{Duration, Instant};

use burn_dtensor::Result;
use burn_dtensor::comm::{CommError, Launch, World, launch};
use burn_dtensor::testing::ProcessTest;

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
    fn strike(self) {
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

/// Rank 1 of 3 is struck before its second call; the others are told, in that call or the next, and go on.
fn program(world: &World, operation: Operation, fault: Fault) -> Result<Duration> {
    let all = world.all();
    operation.call(world, &all, Arguments::new("first"))?;
    if world.rank() == 1 {
        fault.strike();
    }
    let start = Instant::now();
    // A send, or a root's part, may be over before.
    let told = operation.call(world, &all, Arguments::new("second")).and_then(|()| all.barrier("end".into()).wait());
    let took = start.elapsed();
    match told.expect_err("rank 1 is gone") {
        CommError::Disconnected { rank: 1, .. } => {}
        CommError::RankLeft { rank: 1, .. } if fault == Fault::Exits => {}
        error => panic!("{fault:?} in {operation:?}: {error}"),
    }
    let left = world.shrink()?;
    assert_eq!(left.ranks_before(), Some(&[0, 2][..]));
    operation.call(&left, &left.all(), Arguments::new("those that are left"))?;
    Ok(took)
}

fn strikes(fault: Fault, operations: impl IntoIterator<Item = Operation>) {
    for operation in operations {
        let test = ProcessTest::new(3);
        // One that exits takes leave, whatever the library.
        let test = match fault {
            Fault::Exits => Some(test),
            Fault::Killed => test.fault_tolerant(),
            Fault::Stopped => test.detecting(),
        };
        let Some(test) = test else { return };
        let text = test.run(|| {
            let ends = launch(Launch::from_env(3).unwrap(), |world| program(world, operation, fault));
            for (rank, took) in ends.unwrap_or_else(|error| panic!("{fault:?} in {operation:?}: {error}")) {
                println!("rank {rank} was told after {took:?}");
            }
        });
        let Some(text) = text else { return };
        let told = text.lines().filter_map(|line| Some(line.split_once(" was told after ")?.1)).collect::<Vec<_>>();
        println!("{fault:?} in {operation:?}: told after {told:?}");
        assert_eq!(told.len(), 2, "{text}");
    }
}

#[test]
fn a_process_that_is_killed_in_any_operation_is_told() {
    strikes(Fault::Killed, OPERATIONS);
}

#[test]
fn a_process_that_is_stopped_is_told() {
    let some = [Operation::AllGather, Operation::ReduceScatter, Operation::Messages, Operation::Barrier];
    strikes(Fault::Stopped, some);
}

#[test]
fn a_process_that_exits_is_told() {
    let some = [Operation::AllGather, Operation::ReduceScatter, Operation::Messages, Operation::Barrier];
    strikes(Fault::Exits, some);
}
