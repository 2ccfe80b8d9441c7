//! The same training on one device, and how far ranks may be from it.

use std::collections::BTreeMap;

use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};

use super::choices::Precision;
use super::net::{Net, WIDTH};
use super::node::Run;
use super::plan::Plan;
use super::train::{LEARNING_RATE, by_path, device, optimizer};
use crate::fsdp::support::{elements, on_device};

/// The results that ranks must have.
pub struct Expected {
    /// The values of every parameter, by path.
    pub params: BTreeMap<String, Vec<f64>>,
    /// The losses of each rank's forwards that no backward followed, before they are scaled.
    pub evaluated: Vec<Vec<f64>>,
    /// The largest error of half precision in parameters, by path, and in losses; none in double
    /// precision.
    pub rounding: BTreeMap<String, f64>,
    pub rounding_of_losses: f64,
}

/// Trains on the mean of all ranks' losses, as gradients are scaled.
pub fn unsharded(plan: &Plan, start: &[Net]) -> Expected {
    let plan = &Plan {
        tree: plan.tree.computed_once(),
        ..plan.clone()
    };
    let device = device(plan, &Device::flex());
    let mut nets: Vec<_> = start.iter().map(|net| on_device(net, &device)).collect();
    let mut optimizers: Vec<_> = nets.iter().map(|_| optimizer(plan)).collect();
    let mut evaluated = vec![Vec::new(); plan.ranks()];
    // A mean is a sum divided by the number of ranks.
    let scale = plan.scaling.of_sums(plan.ranks()) * plan.ranks() as f64;
    for step in 0..plan.steps {
        let [first, last] = plan.batches_of(step);
        let mut sums: Vec<Option<Tensor<1>>> = vec![None; nets.len()];
        for batch in first..=last {
            let losses = |(model, net): (usize, &Net)| -> Vec<_> {
                (0..plan.ranks())
                    .map(|rank| net.loss(plan, Run { model, rank, batch }, None, &device))
                    .collect()
            };
            let losses: Vec<Vec<_>> = nets.iter().enumerate().map(losses).collect();
            let calls = [
                plan.is_before(plan.evaluated, batch),
                plan.evaluated.before_backwards,
            ];
            let times = calls.into_iter().filter(|call| *call).count() * plan.mode.forwards().len();
            for (rank, evaluated) in evaluated.iter_mut().enumerate() {
                let all: Vec<_> = losses
                    .iter()
                    .map(|losses| losses[rank].clone().into_scalar::<f64>() / plan.scaling.loss)
                    .collect();
                (0..times).for_each(|_| evaluated.extend(&all));
            }
            for (losses, sum) in losses.into_iter().zip(&mut sums) {
                // Burn's gradient of a quotient by a scalar is in single precision; that of a mean
                // is not.
                let loss = Tensor::cat(losses, 0).mean();
                *sum = Some(sum.take().map_or(loss.clone(), |sum| sum + loss));
            }
        }
        for ((net, sum), optimizer) in nets.iter_mut().zip(sums).zip(&mut optimizers) {
            let scale = Tensor::from_data([scale], (&device, DType::F64));
            let grads = (sum.expect("a batch") * scale).backward();
            *net = optimizer.step(
                LEARNING_RATE,
                net.clone(),
                GradientsParams::from_grads(grads, net),
            );
        }
    }
    let params = nets
        .iter()
        .enumerate()
        .flat_map(|(model, net)| by_path(model, &net.clone().cast(DType::F64)));
    let (rounding, rounding_of_losses) = match plan.precision {
        Precision::Double => (BTreeMap::new(), 0.0),
        _ => rounding(plan, start, &device),
    };
    Expected {
        params: params.collect(),
        evaluated,
        rounding,
        rounding_of_losses,
    }
}

/// The largest relative error of a number that is rounded to half precision, and the largest
/// absolute one of small numbers.
const RELATIVE: f64 = 1.0 / 2048.0;
const ABSOLUTE: f64 = 1.0 / 33_554_432.0;

/// Returns how far a step of SGD in half precision may be from one in double precision, of each
/// parameter, and how far losses.
///
/// ```text
/// reduced    each rank's gradient ─ cast ─ + earlier micro-batches' ─ reduce-scatter ─ all-reduce ─ scale
///            each arrow rounds once what is at most the sum of all ranks' magnitudes
/// computed   each operation between parameters and loss, forward and backward, rounds what is at most as large as the
///            largest gradient of the model
/// ```
fn rounding(plan: &Plan, start: &[Net], device: &Device) -> (BTreeMap<String, f64>, f64) {
    let (micro_batches, ranks) = (plan.batches_a_step, plan.ranks());
    // Products and sums of a layer, its bias, the operators after it, its factor, and the sum with
    // the towers beside it.
    let operations = 4 + plan
        .tree
        .sum_of(&|node| (WIDTH + 4 + node.tail) * if node.twice { 2 } else { 1 });
    let of_sums = plan.scaling.of_sums(ranks);
    let mut all = BTreeMap::new();
    for (model, net) in start.iter().enumerate() {
        let net = on_device(&net.clone().cast(DType::F64), device);
        let mut magnitudes: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let runs = (0..ranks)
            .flat_map(|rank| (0..micro_batches).map(move |batch| Run { model, rank, batch }));
        for run in runs.filter(|&run| plan.is_tracked(run)) {
            let grads =
                GradientsParams::from_grads(net.loss(plan, run, None, device).backward(), &net);
            let grads = elements::<f64>(&net, Some(&grads));
            for (path, grads) in grads {
                let sums = magnitudes
                    .entry(path)
                    .or_insert_with(|| vec![0.0; grads.len()]);
                sums.iter_mut()
                    .zip(grads)
                    .for_each(|(sum, grad)| *sum += grad.abs());
            }
        }
        let largest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        let of_model = magnitudes
            .values()
            .map(|values| largest(values))
            .fold(0.0, f64::max);
        for (path, values) in magnitudes {
            let reductions = if plan.precision.reduces_in_half() {
                micro_batches + 3
            } else {
                0
            } as f64;
            let computed = if plan.precision.computes_in_half() {
                2 * operations
            } else {
                0
            } as f64;
            let gradients = RELATIVE * (reductions * largest(&values) + computed * of_model);
            let small = ABSOLUTE
                * (reductions + computed)
                * ((ranks * micro_batches) as f64 * of_sums + 1.0);
            all.insert(
                format!("{model}.{path}"),
                LEARNING_RATE * (gradients * of_sums + small),
            );
        }
    }
    let of_losses = if plan.precision.computes_in_half() {
        RELATIVE * operations as f64
    } else {
        0.0
    };
    (all, of_losses)
}
