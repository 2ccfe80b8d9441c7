//! Random trees of modules under `fully_shard`: they must train as the unsharded tree does.
//!
//! Chains and parallel towers, nested units, with and without a root unit, reads outside `unit`,
//! frozen, tied and replicated parameters, weights that some or all ranks leave unused, inputs that
//! some ranks alone track, batches of other sizes on other ranks, towers that no loss hears, modules that run
//! twice, units of several modules, blocks that backward computes again, shards in host memory, parameters of two dtypes
//! in a unit, gradients added up over several backwards, gradient checkpointing, HSDP, every policy of resharding. After
//! some steps of SGD or AdamW every parameter, in double precision but for some factors, is that of the unsharded tree,
//! which is trained on the mean of all ranks' losses.
//!
//! Some of them run on wgpu, too, in single precision.
//!
//! `RANDOM_TREES` and `RANDOM_TREES_ON_WGPU` say how many to run, `RANDOM_TREES_FROM` the first seed. A failing plan is
//! made small and printed.

mod net;
mod plan;

use std::time::Duration;

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{full_model, fully_shard, units};
use burn_dtensor::mesh::DeviceMesh;

use crate::fsdp::support::{elements, furthest, on_device};
use crate::random_programs::setting;
use net::Net;
use plan::Plan;

/// How many trees run where the environment does not say.
const TREES: u64 = 100;
#[cfg(feature = "wgpu")]
const TREES_ON_WGPU: u64 = 20;

/// A step takes milliseconds.
const DEADLINE: Duration = Duration::from_secs(20);

/// Between sums in double precision in different orders. AdamW divides by roots of small squares.
const TOLERANCE: f64 = 1e-9;

/// The same where some factors are in single precision.
const NARROW: f64 = 1e-5;

/// The same where all is in single precision.
const SINGLE: f64 = 1e-3;

const LEARNING_RATE: f64 = 0.05;

#[test]
fn random_trees_train_as_one_device_does() {
    train_all(setting("RANDOM_TREES", TREES), &Device::flex());
}

#[cfg(feature = "wgpu")]
#[test]
fn random_trees_train_on_wgpu_as_one_device_does() {
    train_all(setting("RANDOM_TREES_ON_WGPU", TREES_ON_WGPU), &Device::wgpu(burn::tensor::DeviceKind::DefaultDevice));
}

fn train_all(count: u64, on: &Device) {
    let first = setting("RANDOM_TREES_FROM", 0);
    let mut failures = Vec::new();
    for seed in first..first + count {
        let plan = Plan::draw(seed);
        if let Some(failure) = fails(&plan, on) {
            let (small, how) = shrink(plan, failure, on);
            println!("{small:#?}\n// {how}\n");
            failures.push(seed);
        }
    }
    assert!(failures.is_empty(), "trees of seeds {failures:?} failed");
}

/// Trains unsharded on the CPU, and sharded on a device; in words what differs, if anything does.
fn fails(plan: &Plan, on: &Device) -> Option<String> {
    let start = Net::new(plan, &Device::flex().autodiff());
    let expected = elements::<f64>(&unsharded(plan, start.clone()).cast(DType::F64), None);
    let start = if *on == Device::flex() { start } else { start.cast(DType::F32) };
    let config = Launch::threads(plan.ranks()).deadline(DEADLINE).device(on.clone());
    let trained = launch(config, |world| -> Result<_> {
        let names = if plan.mesh.len() == 1 { vec!["shard"] } else { vec!["replicate", "shard"] };
        let mesh = DeviceMesh::new(world, &plan.mesh, names)?;
        let device = device(plan, world.device());
        let mut net = fully_shard(on_device(&start, &device), &mesh, plan.config())?;
        let mut optimizer = optimizer(plan);
        for step in 0..plan.steps {
            let [first, last] = plan.batches_of(step);
            for at in first..last {
                units(&net)?.set_requires_gradient_sync(false);
                drop(net.loss(plan, world.rank(), at, &device).backward());
            }
            units(&net)?.set_requires_gradient_sync(true);
            let grads = net.loss(plan, world.rank(), last, &device).backward();
            net = optimizer.step(LEARNING_RATE, net.clone(), GradientsParams::from_grads(grads, &net));
        }
        Ok(elements::<f64>(&on_device(&full_model(&net)?, &Device::flex()).cast(DType::F64), None))
    });
    let trained = match trained {
        Ok(trained) => trained,
        Err(error) => return Some(error.to_string()),
    };
    let tolerance = match *on == Device::flex() {
        true if plan.tree.is_narrow() => NARROW,
        true => TOLERANCE,
        false => SINGLE,
    };
    for (rank, found) in &trained {
        if !found.keys().eq(expected.keys()) {
            return Some(format!("rank {rank} has the parameters {:?}", found.keys()));
        }
        for (path, expected) in &expected {
            let furthest = furthest(&found[path], expected);
            if furthest.is_nan() || furthest > tolerance {
                return Some(format!("`{path}` is off by {furthest:.1e} on rank {rank}"));
            }
        }
    }
    None
}

/// One device, trained on the mean of all ranks' losses.
fn unsharded(plan: &Plan, net: Net) -> Net {
    let plan = &Plan { tree: plan.tree.computed_once(), ..plan.clone() };
    let device = device(plan, &Device::flex());
    let (mut net, mut optimizer) = (on_device(&net, &device), optimizer(plan));
    for step in 0..plan.steps {
        let [first, last] = plan.batches_of(step);
        // Burn's gradient of a quotient by a scalar is in single precision; that of a mean is not.
        let of_batch =
            |at| Tensor::cat((0..plan.ranks()).map(|rank| net.loss(plan, rank, at, &device)).collect(), 0).mean();
        let loss = (first..=last).map(of_batch).reduce(|a, b| a + b).expect("a batch");
        net = optimizer.step(LEARNING_RATE, net.clone(), GradientsParams::from_grads(loss.backward(), &net));
    }
    net
}

fn device(plan: &Plan, device: &Device) -> Device {
    let device = device.clone().autodiff();
    if plan.checkpointing { device.gradient_checkpointing() } else { device }
}

fn optimizer(plan: &Plan) -> ModuleOptimizer {
    if plan.adam { AdamWConfig::new().with_epsilon(1e-5).init() } else { SgdConfig::new().init() }
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
