//! Every fault in every operation, on both engines: what each other rank is told, as a table.
//!
//! Deadlines are far longer than the suite's limit for one test, so that only prompt errors pass.

#[cfg(feature = "mpi")]
mod killed;
mod operation;
mod schedules;

use std::time::{Duration, Instant};

use burn::tensor::DType;
use burn_dtensor::comm::{CommError, Launch, LaunchError, World, launch};
#[cfg(feature = "mpi")]
use burn_dtensor::testing::ProcessTest;
use burn_dtensor::{Error, Result};

use operation::{Arguments, OPERATIONS, Operation};

/// What one rank does in the second of three calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Panics,
    Fails,
    Returns,
    OtherOperation,
    OtherOrder,
    OtherShape,
    OtherDtype,
    OtherLabel,
    OneMore,
    OneLess,
}

/// What the other ranks are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Panicked,
    Failed,
    Left,
    Mismatch,
    /// Each waits for the other.
    Deadlock,
}

/// What every operation is told of by a fault, but for these exceptions.
static TABLE: [(Fault, Told); 10] = [
    (Fault::Panics, Told::Panicked),
    (Fault::Fails, Told::Failed),
    (Fault::Returns, Told::Left),
    (Fault::OtherOperation, Told::Mismatch),
    (Fault::OtherOrder, Told::Mismatch),
    (Fault::OtherShape, Told::Mismatch),
    (Fault::OtherDtype, Told::Mismatch),
    (Fault::OtherLabel, Told::Mismatch),
    (Fault::OneMore, Told::Mismatch),
    (Fault::OneLess, Told::Mismatch),
];

/// A message and a barrier do not meet: one rank waits for the message of another, which waits in the barrier for all. Of
/// many ranks one may have gone on to the last barrier before, which is another.
const EXCEPTIONS: [(Operation, Fault, &[Told]); 1] =
    [(Operation::Messages, Fault::OtherOperation, &[Told::Deadlock, Told::Mismatch])];

/// A barrier has no tensors.
fn is_possible(operation: Operation, fault: Fault) -> bool {
    operation != Operation::Barrier || ![Fault::OtherShape, Fault::OtherDtype].contains(&fault)
}

/// What may be told.
fn expected(operation: Operation, fault: Fault) -> &'static [Told] {
    let exception = EXCEPTIONS.iter().find(|(other, of, _)| (*other, *of) == (operation, fault));
    let row = || TABLE.iter().find(|(of, _)| *of == fault).expect("every fault has a row");
    exception.map_or_else(|| std::slice::from_ref(&row().1), |(.., told)| told)
}

/// The last rank, which is no root, is at fault in the second of three calls.
fn program(world: &World, operation: Operation, fault: Fault) -> Result<()> {
    let all = world.all();
    let call = |arguments| operation.call(world, &all, arguments);
    let [first, second, third] = ["first", "second", "third"].map(Arguments::new);
    call(first)?;
    if world.rank() + 1 == world.size() {
        match fault {
            Fault::Panics => panic!("boom"),
            Fault::Fails => return Err(Error::other("no such file")),
            Fault::Returns => return Ok(()),
            Fault::OtherOperation => operation.other().call(world, &all, second)?,
            Fault::OtherOrder => {
                call(third)?;
                call(second)?;
            }
            Fault::OtherShape => call(Arguments { width: 4, ..second })?,
            Fault::OtherDtype => call(Arguments { dtype: DType::F64, ..second })?,
            Fault::OtherLabel => call(Arguments { label: "other", ..second })?,
            Fault::OneMore => {
                call(second)?;
                call(second)?;
            }
            Fault::OneLess => {}
        }
    } else {
        call(second)?;
    }
    call(third)?;
    Ok(all.barrier("end".into()).wait()?)
}

/// What an error says, of a rank at fault.
fn told(error: &CommError, culprit: usize) -> Option<Told> {
    match error {
        CommError::RankPanicked { rank, message, .. } => {
            (*rank == culprit && message == "boom").then_some(Told::Panicked)
        }
        CommError::RankFailed { rank, message, .. } => {
            (*rank == culprit && message == "no such file").then_some(Told::Failed)
        }
        CommError::RankLeft { rank, .. } => (*rank == culprit).then_some(Told::Left),
        CommError::Mismatch { rank, other, .. } => [*rank, *other].contains(&culprit).then_some(Told::Mismatch),
        CommError::Deadlock { waits } => waits.iter().any(|(rank, ..)| *rank == culprit).then_some(Told::Deadlock),
        _ => None,
    }
}

/// Whether every rank but the culprit was told `expected`, and names it.
fn check(error: &LaunchError, ranks: usize, expected: &[Told], cell: &str) {
    let culprit = ranks - 1;
    let of_others = error.others.iter().filter(|report| report.rank != culprit);
    let errors: Vec<_> = of_others
        .map(|report| match &report.error {
            Some(Error::Comm(error)) => error.clone(),
            other => panic!("{cell}: rank {} ended with {other:?}", report.rank),
        })
        .collect();
    // The first failure is told of the rank that found it, if that is not the culprit.
    assert!(errors.len() + 2 >= ranks && ranks > errors.len(), "{cell}: {error}");
    let cause = match &error.cause {
        Error::Comm(cause) => Some(told(cause, culprit)),
        // The culprit's own.
        _ => None,
    };
    for told in errors.iter().map(|error| told(error, culprit)).chain(cause) {
        assert!(told.is_some_and(|told| expected.contains(&told)), "{cell}: {told:?} of {expected:?}: {error}");
    }
}

/// Every cell, in worlds of so many ranks, made anew for each. Returns how many there are, and how long the slowest took.
fn cells(ranks: usize, launch_on: impl Fn() -> Launch) -> (usize, Duration) {
    let (mut count, mut slowest) = (0, Duration::ZERO);
    for operation in OPERATIONS {
        for (fault, _) in TABLE.iter().filter(|(fault, _)| is_possible(operation, *fault)) {
            let start = Instant::now();
            let config = launch_on().deadline(Duration::from_secs(3600));
            let error = launch(config, |world| program(world, operation, *fault));
            let took = start.elapsed();
            let cell = format!("{fault:?} in {operation:?} on {ranks}");
            let error = error.err().unwrap_or_else(|| panic!("{cell}: every rank succeeded"));
            check(&error, ranks, expected(operation, *fault), &cell);
            (count, slowest) = (count + 1, slowest.max(took));
        }
    }
    (count, slowest)
}

#[test]
fn every_fault_in_every_operation_is_told_on_threads() {
    for ranks in [2, 3, 8] {
        let (count, slowest) = cells(ranks, || Launch::threads(ranks));
        println!("{ranks} threads: {count} cells, the slowest from start to end {slowest:?}");
        assert_eq!(count, 108);
    }
}

#[cfg(feature = "mpi")]
fn on_processes(ranks: usize) {
    let text = ProcessTest::new(ranks).deadline(Duration::from_secs(300)).run(|| {
        let (count, slowest) = cells(ranks, || Launch::from_env(ranks).unwrap());
        println!("{ranks} processes: {count} cells, the slowest from start to end {slowest:?}");
        assert_eq!(count, 108);
    });
    let counts = text.iter().flat_map(|text| text.lines()).filter(|line| line.contains(" cells, "));
    counts.for_each(|line| println!("{line}"));
}

#[cfg(feature = "mpi")]
#[test]
fn every_fault_in_every_operation_is_told_on_two_processes() {
    on_processes(2);
}

#[cfg(feature = "mpi")]
#[test]
fn every_fault_in_every_operation_is_told_on_three_processes() {
    on_processes(3);
}
