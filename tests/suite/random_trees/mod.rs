//! Random trees of modules under `fully_shard`: they must train as the unsharded tree does.
//!
//! Chains and parallel towers, nested units, with and without a root unit, reads outside `unit`,
//! frozen, tied and replicated parameters, weights that some or all ranks leave unused, inputs that
//! some ranks alone track, batches of other sizes on other ranks, towers that no loss hears,
//! modules that run twice, units of several modules, blocks that backward computes again, shards in
//! host memory, parameters of two dtypes in a unit, gradients added up over several backwards that
//! wait in their units or in the program, micro-batches that do not enter some modules, units that
//! stay gathered after backward, forwards that no backward follows, with and without `valid()`,
//! weights that a rank leaves unused once, calls of `reshard` and `unshard`, exports before the
//! first forward, divisors of gradients, forced sums, several models, layers that tensor-parallel
//! ranks share, also fewer features than ranks, gradient checkpointing, HSDP, every policy of
//! resharding.
//!
//! After some steps of SGD or AdamW every parameter, in double precision but for some factors, is
//! that of the unsharded tree, which is trained on the mean of all ranks' losses; and losses of
//! forwards alone are its losses. Some trees compute or reduce in half precision: a step of these
//! is as far from double precision as roundings explain. Of all trees every rank has parameters of
//! the same bits, and a parameter has a gradient on one rank if and only if it has one on all that
//! hold something of it.
//!
//! Some of them run on the GPU of tests, too, in single precision.
//!
//! `RANDOM_TREES` and `RANDOM_TREES_ON_GPU` say how many to run, `RANDOM_TREES_FROM` the first
//! seed. A failing plan is made small and printed.

mod activation;
mod choices;
mod net;
mod node;
mod plan;
mod train;
mod unsharded;

use std::time::Duration;

use burn::tensor::{DType, Device};
use burn_dtensor::comm::{Launch, launch};

use crate::effort::{setting, stops_at_failure};
use crate::fsdp::support::furthest;
use choices::Precision;
use net::Net;
use plan::Plan;
use train::{Trained, sharded};
use unsharded::{Expected, unsharded};

/// How many trees run where the environment does not say.
const TREES: u64 = 40;
#[cfg(feature = "cube")]
const TREES_ON_GPU: u64 = 6;

/// A step takes milliseconds.
const DEADLINE: Duration = Duration::from_secs(20);

/// Between sums in double precision in different orders. AdamW divides by roots of small squares.
const TOLERANCE: f64 = 1e-9;

/// The same where some factors are in single precision.
const NARROW: f64 = 1e-5;

/// The same where all is in single precision, or, on CUDA, where matrix products round their
/// operands to TF32.
const SINGLE: f64 = if cfg!(feature = "cuda") { 2e-2 } else { 1e-3 };

#[test]
fn random_trees_train_as_one_device_does() {
    train_all(setting("RANDOM_TREES", TREES), &Device::flex());
}

#[cfg(feature = "cube")]
#[test]
fn random_trees_train_on_a_gpu_as_one_device_does() {
    train_all(
        setting("RANDOM_TREES_ON_GPU", TREES_ON_GPU),
        &burn_dtensor::testing::gpu(),
    );
}

fn train_all(count: u64, on: &Device) {
    let first = setting("RANDOM_TREES_FROM", 0);
    let mut failures = Vec::new();
    for seed in first..first + count {
        let mut plan = Plan::draw(seed);
        if *on != Device::flex() {
            // Single precision is all that such devices are sure to have.
            plan.precision = Precision::Double;
        }
        if let Some(failure) = fails(&plan, on) {
            assert!(!stops_at_failure(), "tree of seed {seed}: {failure}");
            println!("seed {seed}: {failure}; making it small");
            let (small, how) = shrink(plan, failure, on);
            println!("{small:#?}\n// {how}\n");
            failures.push(seed);
        }
    }
    assert!(failures.is_empty(), "trees of seeds {failures:?} failed");
}

/// Trains unsharded on the CPU, and sharded on a device; in words what differs, if anything does.
fn fails(plan: &Plan, on: &Device) -> Option<String> {
    let mut start: Vec<_> = (0..plan.models)
        .map(|model| Net::new(plan, model, &Device::flex().autodiff()))
        .collect();
    let expected = unsharded(plan, &start);
    if *on != Device::flex() {
        start = start.into_iter().map(|net| net.cast(DType::F32)).collect();
    }
    let config = Launch::threads(plan.ranks() * plan.tensor_parallel)
        .with_deadline(DEADLINE)
        .with_device(on.clone());
    let ranks = match launch(config, |world| sharded(plan, &start, world)) {
        Ok(ranks) => ranks,
        Err(error) => return Some(error.to_string()),
    };
    let tolerance = match *on == Device::flex() {
        true if plan.tree.is_any(|node| node.narrow) => NARROW,
        true => TOLERANCE,
        false => SINGLE,
    };
    let ranks: Vec<_> = ranks.into_iter().map(|(_, trained)| trained).collect();
    let how = |rank: usize| {
        let evaluated = &expected.evaluated[rank / plan.tensor_parallel];
        let how = is_off(&ranks[rank], &expected, evaluated, tolerance)
            .or_else(|| differs(&ranks[rank], &ranks))?;
        Some(format!("on rank {rank} {how}"))
    };
    (0..ranks.len()).find_map(how)
}

/// Describes a difference between a rank and the unsharded tree; `None` if there is none.
fn is_off(
    trained: &Trained,
    expected: &Expected,
    evaluated: &[f64],
    tolerance: f64,
) -> Option<String> {
    let is_off = |found: &[f64], expected: &[f64], rounding: f64| {
        let furthest = furthest(found, expected);
        (furthest.is_nan() || furthest > tolerance + rounding).then_some(furthest)
    };
    if !trained.params.keys().eq(expected.params.keys()) {
        return Some(format!("are the parameters {:?}", trained.params.keys()));
    }
    for (path, values) in &expected.params {
        let rounding = expected.rounding.get(path).copied().unwrap_or(0.0);
        if let Some(furthest) = is_off(&trained.params[path], values, rounding) {
            return Some(format!("`{path}` is off by {furthest:.1e}"));
        }
    }
    let furthest = is_off(&trained.evaluated, evaluated, expected.rounding_of_losses)?;
    Some(format!(
        "losses of forwards alone are off by {furthest:.1e}"
    ))
}

/// Describes a difference between a rank and any other: of a parameter's bits, or of which
/// parameters had a gradient; `None` if there is none.
fn differs(trained: &Trained, ranks: &[Trained]) -> Option<String> {
    for other in ranks {
        let differing = trained
            .params
            .iter()
            .find(|(path, values)| other.params[*path] != **values);
        if let Some((path, values)) = differing {
            let furthest = furthest(values, &other.params[path]);
            return Some(format!(
                "`{path}` differs from another rank's by {furthest:.1e}"
            ));
        }
        for (step, (here, there)) in trained.stepped.iter().zip(&other.stepped).enumerate() {
            let differs = |path: &&String| there.get(*path).is_some_and(|has| *has != here[*path]);
            if let Some(path) = here.keys().find(differs) {
                let has = if here[path] { "has" } else { "lacks" };
                return Some(format!(
                    "`{path}` {has} a gradient, other than on another, in step {step} of all models'"
                ));
            }
        }
    }
    None
}

fn shrink(mut plan: Plan, mut how: String, on: &Device) -> (Plan, String) {
    'again: loop {
        for smaller in plan.smaller() {
            if let Some(failure) = fails(&smaller, on) {
                (plan, how) = (smaller, failure);
                continue 'again;
            }
        }
        return (plan, how);
    }
}
