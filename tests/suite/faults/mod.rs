//! Every fault in every operation, on both backends, and in the middle of a training step: what
//! each other rank is told, as tables, and that the flight files alone tell it too.
//!
//! Deadlines are far longer than the suite's limit for one test, so that only prompt errors pass.
//!
//! | file | what it holds |
//! |---|---|
//! | `operation`, `fault` | what ranks call, and what one of them does wrong |
//! | `told`, `folder` | what the others are told, and where that is written |
//! | `training`, `hook` | faults in forward and backward |
//! | `killed` | processes that are killed, stopped, or exit |
//! | `schedules` | random faults |

mod fault;
mod folder;
#[cfg(feature = "mpi")]
mod killed;
mod operation;
mod schedules;
mod told;
mod training;

use std::cell::RefCell;

use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, NcclReductions, World};
#[cfg(feature = "mpi")]
use burn_dtensor::testing::ProcessTest;
use burn_dtensor::testing::SimulatedGpus;

use fault::{Fault, second_and_third};
use folder::Folder;
use operation::{Arguments, OPERATIONS, Operation};
use told::{Cells, Told};

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

/// A message and a barrier do not meet: one rank waits for the message of another, which waits in
/// the barrier for all. Of many ranks one may have gone on to the last barrier before, which is
/// another.
const EXCEPTIONS: [(Operation, Fault, &[Told]); 1] = [(
    Operation::Messages,
    Fault::OtherOperation,
    &[Told::Deadlock, Told::Mismatch],
)];

/// What may be told.
fn expected(operation: Operation, fault: Fault) -> &'static [Told] {
    let exception = EXCEPTIONS
        .iter()
        .find(|(other, of, _)| (*other, *of) == (operation, fault));
    let row = || {
        TABLE
            .iter()
            .find(|(of, _)| *of == fault)
            .expect("every fault has a row")
    };
    exception.map_or_else(|| std::slice::from_ref(&row().1), |(.., told)| told)
}

/// The last rank, which is no root, is at fault in the second of three calls.
fn program(world: &World, operation: Operation, fault: Fault) -> Result<()> {
    let all = world.all();
    operation.call(world, &all, Arguments::new("first"))?;
    let fault = (world.rank() + 1 == world.size()).then_some(fault);
    if second_and_third(world, &all, operation, fault)?.is_break() {
        return Ok(());
    }
    Ok(all.barrier("end".into()).wait()?)
}

/// Every cell, in worlds of so many ranks, made anew for each.
fn cells(ranks: usize, folder: &Folder, launch_on: impl Fn() -> Launch) -> Cells {
    let mut cells = Cells::default();
    for operation in OPERATIONS {
        for (fault, _) in TABLE
            .iter()
            .filter(|(fault, _)| fault.is_possible_in(operation))
        {
            let cell = format!("{fault:?} in {operation:?}");
            let at = (launch_on(), folder, ranks);
            cells.run(at, expected(operation, *fault), &cell, |world| {
                program(world, operation, *fault)
            });
        }
    }
    cells
}

#[test]
fn every_fault_in_every_operation_is_told_on_threads() {
    for ranks in [2, 3, 8] {
        let folder = Folder::here(&format!("operations-{ranks}"));
        let cells = cells(ranks, &folder, || Launch::threads(ranks));
        println!("{ranks} threads: {cells}");
        assert_eq!(cells.count, 108);
    }
}

/// As above, on ranks that exchange tensors by NCCL once they have agreed on the call.
#[test]
fn every_fault_in_every_operation_is_told_on_simulated_gpus() {
    for ranks in [2, 4, 8] {
        let folder = Folder::here(&format!("operations-on-gpus-{ranks}"));
        let all = RefCell::new(Vec::new());
        let cells = cells(ranks, &folder, || {
            let gpus = SimulatedGpus::new();
            all.borrow_mut().push(gpus.clone());
            gpus.threads(ranks, NcclReductions::Native)
        });
        println!("{ranks} simulated GPUs: {cells}");
        assert_eq!(cells.count, 108);
        for gpus in all.into_inner() {
            assert_eq!(gpus.violations(), Vec::<String>::new());
        }
    }
}

#[cfg(feature = "mpi")]
fn on_processes(ranks: usize) {
    let text = ProcessTest::new(ranks)
        .with_deadline(std::time::Duration::from_secs(300))
        .run(|| {
            let folder = Folder::of_all("operations");
            let cells = cells(ranks, &folder, || Launch::from_env(ranks).unwrap());
            // Of several processes one has looked at the files.
            if cells.alone > 0 {
                println!("{ranks} processes: {cells}");
            }
            assert_eq!(cells.count, 108);
        });
    let counts = text
        .iter()
        .flat_map(|text| text.lines())
        .filter(|line| line.contains(" cells, "));
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
