//! A rank that fails inside a sharded model: every other rank returns a typed error naming it.

use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{CommError, Launch, LaunchError, World, launch};
use burn_dtensor::fsdp::{FullyShard, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;

use super::support::tensor;

const CULPRIT: usize = 2;

#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

fn run(fault: impl Fn(&World, &Pair, Tensor<2>, &Device) -> Result<Tensor<2>, Error> + Sync) -> LaunchError {
    launch(Launch::threads(4).deadline(Duration::from_secs(60)), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [4], ["shard"])?;
        let pair = Pair { first: LinearConfig::new(5, 5).init(&device), second: LinearConfig::new(5, 5).init(&device) };
        let pair = fully_shard(pair, &mesh, FullyShard::new().units(["first", "second"]))?;
        let x = tensor(1, [2, 5], &device);
        let output = fault(world, &pair, x, &device)?;
        let _ = output.sum().backward();
        Ok(())
    })
    .unwrap_err()
}

fn forward(pair: &Pair, x: Tensor<2>) -> Tensor<2> {
    let x = unit(&pair.first, x, |first, x| first.forward(x));
    unit(&pair.second, x, |second, x| second.forward(x))
}

/// Every survivor has a typed communication error that names the culprit.
fn assert_named(error: &LaunchError) {
    for report in &error.others {
        if report.rank == CULPRIT {
            continue;
        }
        let survivor = report.error.as_ref().unwrap_or_else(|| panic!("rank {} has no error: {error}", report.rank));
        assert!(matches!(survivor, Error::Comm(_)), "rank {}: {survivor:?}", report.rank);
        assert!(survivor.to_string().contains(&format!("rank {CULPRIT}")), "rank {}: {survivor}", report.rank);
    }
}

#[test]
fn a_panic_in_forward() {
    let error = run(|world, pair, x, _| {
        let x = unit(&pair.first, x, |first, x| first.forward(x));
        if world.rank() == CULPRIT {
            panic!("out of luck");
        }
        Ok(unit(&pair.second, x, |second, x| second.forward(x)))
    });
    assert_eq!(error.rank, CULPRIT);
    assert!(error.to_string().contains("out of luck"), "{error}");
    assert_named(&error);
}

#[test]
fn an_early_return_in_forward() {
    let error = run(|world, pair, x, device| match world.rank() {
        CULPRIT => Ok(tensor::<2>(9, [1, 1], device).require_grad()),
        _ => Ok(forward(pair, x)),
    });
    assert_named(&error);
    assert!(
        error.others.iter().any(|report| matches!(report.error, Some(Error::Comm(CommError::RankLeft { .. }))))
            || matches!(error.cause, Error::Comm(CommError::RankLeft { .. }))
    );
}

#[test]
fn an_error_of_the_program() {
    let error = run(|world, pair, x, _| match world.rank() {
        CULPRIT => Err(Error::other("no more data")),
        _ => Ok(forward(pair, x)),
    });
    assert_eq!(error.rank, CULPRIT);
    assert!(error.to_string().contains("no more data"), "{error}");
    assert_named(&error);
}

#[test]
fn units_in_another_order() {
    let error = run(|world, pair, x, _| {
        if world.rank() == CULPRIT {
            let x = unit(&pair.second, x, |second, x| second.forward(x));
            return Ok(unit(&pair.first, x, |first, x| first.forward(x)));
        }
        Ok(forward(pair, x))
    });
    assert!(matches!(&error.cause, Error::Comm(CommError::Mismatch { .. })), "{error}");
    assert!(error.to_string().contains("first") && error.to_string().contains("second"), "{error}");
}

#[test]
fn another_order_in_backward() {
    // Forward gathers in one order on all ranks; the culprit's graph puts the units the other way.
    let error = run(|world, pair, x, _| {
        let a = unit(&pair.first, x.clone(), |first, x| first.forward(x));
        if world.rank() == CULPRIT {
            let b = unit(&pair.second, x, |second, x| second.forward(x));
            Ok(a.tanh().tanh() + b)
        } else {
            let b = unit(&pair.second, a, |second, x| second.forward(x));
            Ok(b)
        }
    });
    assert!(matches!(&error.cause, Error::Comm(CommError::Mismatch { .. })), "{error}");
}

#[test]
fn a_unit_left_out_of_backward() {
    let error = run(|world, pair, x, _| {
        let a = unit(&pair.first, x.clone(), |first, x| first.forward(x));
        let b = unit(&pair.second, a.clone(), |second, x| second.forward(x));
        Ok(if world.rank() == CULPRIT { a } else { b })
    });
    assert_named(&error);
    let names_it = |error: &Error| match error {
        Error::Comm(CommError::Mismatch { rank, other, .. }) => [*rank, *other].contains(&CULPRIT),
        Error::Comm(CommError::RankLeft { rank, .. }) => *rank == CULPRIT,
        _ => false,
    };
    let survivors = error.others.iter().filter(|report| report.rank != CULPRIT);
    let told: Vec<_> = [&error.cause].into_iter().chain(survivors.filter_map(|report| report.error.as_ref())).collect();
    assert!(told.len() > 2 && told.into_iter().all(names_it), "{error:?}");
}

#[test]
fn a_panic_in_backward() {
    let error = run(|world, pair, x, _| {
        let scaled = x.require_grad() * 2.0;
        if world.rank() == CULPRIT {
            // burn refuses to run backward over a tape twice.
            let _ = scaled.clone().sum().backward();
        }
        Ok(forward(pair, scaled))
    });
    assert_eq!(error.rank, CULPRIT);
    assert!(error.to_string().contains("already been consumed"), "{error}");
    assert_named(&error);
}

#[test]
fn a_parameter_of_another_shape() {
    let error = launch(Launch::threads(4), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [4], ["shard"])?;
        let width = if world.rank() == CULPRIT { 6 } else { 5 };
        let linear = LinearConfig::new(width, 4).init(&device);
        fully_shard(linear, &mesh, FullyShard::new()).map(|_| ())
    })
    .unwrap_err();
    assert!(matches!(&error.cause, Error::Comm(CommError::Mismatch { .. })), "{error}");
    assert!(error.to_string().contains("weight"), "{error}");
}
