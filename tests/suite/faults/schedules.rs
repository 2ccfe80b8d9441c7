//! Random schedules of operations with one fault in each: never a hang, a wrong number, or an end
//! of the process.
//!
//! `FAULT_SCHEDULES` says how many (500 by default), `FAULT_SCHEDULES_FROM` the first seed.

use std::env;
use std::time::Duration;

use burn::tensor::Tensor;
use burn_dtensor::comm::{CommError, Communicator, Launch, ReduceOp, World, launch};
use burn_dtensor::{Error, Result};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::operation::{Arguments, OPERATIONS};

const LABELS: [&str; 4] = ["a", "b", "c", "d"];

/// What the rank at fault does, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Nothing,
    Panics,
    Fails,
    Returns,
    Skips,
    Repeats,
    OtherLabel,
    OtherWidth,
    OtherOperation,
    DropsItsWork,
    Sleeps,
}

const FAULTS: [Fault; 11] = [
    Fault::Nothing,
    Fault::Panics,
    Fault::Fails,
    Fault::Returns,
    Fault::Skips,
    Fault::Repeats,
    Fault::OtherLabel,
    Fault::OtherWidth,
    Fault::OtherOperation,
    Fault::DropsItsWork,
    Fault::Sleeps,
];

/// One rank's way through a schedule: all ranks draw the same, but for the fault.
fn program(world: &World, seed: u64) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    let size = world.size();
    let (culprit, fault) = (
        rng.random_range(0..size),
        FAULTS[rng.random_range(0..FAULTS.len())],
    );
    let steps = rng.random_range(1..12);
    let (at, goes_on) = (rng.random_range(0..steps), rng.random());
    // The world, and a pair of neighbours.
    let pair = [world.rank() / 2 * 2, world.rank() / 2 * 2 + 1].map(|rank| rank.min(size - 1));
    let pair = if pair[0] == pair[1] {
        world.group(&pair[..1])?
    } else {
        world.group(&pair)?
    };
    let groups = [world.all(), world.all(), pair];
    for step in 0..steps {
        let operation = OPERATIONS[rng.random_range(0..OPERATIONS.len())];
        let comm = &groups[rng.random_range(0..groups.len())];
        let arguments = Arguments {
            width: rng.random_range(1..5),
            ..Arguments::new(LABELS[rng.random_range(0..4)])
        };
        let fault = if step == at && world.rank() == culprit {
            fault
        } else {
            Fault::Nothing
        };
        let call = || operation.call(world, comm, arguments);
        let done = match fault {
            Fault::Nothing => call(),
            Fault::Panics => panic!("boom"),
            Fault::Fails => return Err(Error::other("no such file")),
            Fault::Returns => return Ok(()),
            Fault::Skips => Ok(()),
            Fault::Repeats => call().and_then(|()| call()),
            Fault::OtherLabel => operation.call(
                world,
                comm,
                Arguments {
                    label: "other",
                    ..arguments
                },
            ),
            Fault::OtherWidth => operation.call(
                world,
                comm,
                Arguments {
                    width: 7,
                    ..arguments
                },
            ),
            Fault::OtherOperation => operation.other().call(world, comm, arguments),
            Fault::DropsItsWork => {
                drop(comm.barrier("dropped".into()));
                call()
            }
            Fault::Sleeps => {
                std::thread::sleep(Duration::from_millis(5));
                call()
            }
        };
        match done
            .map_err(Error::from)
            .and_then(|()| sum(world, &groups[0]))
        {
            Ok(()) => {}
            // Every second schedule ends; in the others those that are left go on.
            Err(error) if goes_on => return after(world, error),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A number that every rank knows.
fn sum(world: &World, comm: &Communicator) -> Result<()> {
    let tensor =
        Tensor::<1>::full([2], comm.group().rank() as f32 + 1.0, world.device()).into_dispatch();
    let sum = comm
        .all_reduce("sum".into(), vec![tensor], ReduceOp::Sum)
        .wait()?
        .remove(0);
    let size = comm.group().size();
    let values: Vec<f32> = Tensor::<1>::from_dispatch(sum).into_data().try_to_vec()?;
    assert_eq!(
        values,
        [(size * (size + 1) / 2) as f32; 2],
        "a wrong number"
    );
    Ok(())
}

/// The ranks that are left meet once more, and reduce.
fn after(world: &World, error: Error) -> Result<()> {
    let Error::Comm(_) = &error else {
        return Err(error);
    };
    let left = world.shrink()?;
    sum(&left, &left.all())
}

/// Whether an error is one that a fault may have.
fn is_expected(error: &Error) -> bool {
    match error {
        Error::Comm(CommError::RankPanicked { message, .. }) => message == "boom",
        Error::Comm(
            CommError::RankFailed { .. }
            | CommError::RankReturned { .. }
            | CommError::Mismatch { .. }
            | CommError::Deadlock { .. }
            | CommError::Revoked { .. },
        ) => true,
        Error::Other(error) => error.to_string() == "no such file",
        _ => false,
    }
}

#[test]
fn random_faults_are_told() {
    let number = |name: &str, otherwise: u64| {
        env::var(name).map_or(otherwise, |text| text.parse().expect(name))
    };
    let (first, count) = (
        number("FAULT_SCHEDULES_FROM", 0),
        number("FAULT_SCHEDULES", 500),
    );
    println!("seeds {first} to {}", first + count);
    let mut failed = 0;
    for seed in first..first + count {
        let ranks = 2 + (seed % 4) as usize;
        let config = Launch::threads(ranks).with_deadline(Duration::from_secs(3600));
        let Err(error) = launch(config, |world| program(world, seed)) else {
            continue;
        };
        failed += 1;
        assert!(is_expected(&error.cause), "seed {seed}: {error}");
    }
    println!("{failed} of {count} launches have failed, as they should");
    assert!(failed > count / 5);
}
