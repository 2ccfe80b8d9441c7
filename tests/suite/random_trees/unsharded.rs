//! The same training on one device.

use std::collections::BTreeMap;

use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};

use super::net::Net;
use super::node::Run;
use super::plan::Plan;
use super::train::{LEARNING_RATE, device, optimizer};
use crate::fsdp::support::{elements, on_device};

/// What ranks must come to.
pub struct Expected {
    /// The values of every parameter, by path.
    pub params: BTreeMap<String, Vec<f64>>,
    /// The losses of each rank's forwards that no backward followed.
    pub evaluated: Vec<Vec<f64>>,
}

/// Trains on the mean of all ranks' losses.
pub fn unsharded(plan: &Plan, start: &Net) -> Expected {
    let plan = &Plan { tree: plan.tree.computed_once(), ..plan.clone() };
    let device = device(plan, &Device::flex());
    let (mut net, mut optimizer) = (on_device(start, &device), optimizer(plan));
    let mut evaluated = vec![Vec::new(); plan.ranks()];
    for step in 0..plan.steps {
        let [first, last] = plan.batches_of(step);
        let mut sum: Option<Tensor<1>> = None;
        for batch in first..=last {
            let loss = |rank| net.loss(plan, Run { rank, batch }, &device);
            let losses: Vec<_> = (0..plan.ranks()).map(loss).collect();
            let times = usize::from(plan.evaluates_before(batch)) + usize::from(plan.evaluated.before_backwards);
            for (loss, evaluated) in losses.iter().zip(&mut evaluated) {
                evaluated.extend(vec![loss.clone().into_scalar::<f64>(); times]);
            }
            // Burn's gradient of a quotient by a scalar is in single precision; that of a mean is not.
            let loss = Tensor::cat(losses, 0).mean();
            sum = Some(match sum {
                Some(sum) => sum + loss,
                None => loss,
            });
        }
        let grads = sum.expect("a batch").backward();
        net = optimizer.step(LEARNING_RATE, net.clone(), GradientsParams::from_grads(grads, &net));
    }
    Expected { params: elements(&net.cast(DType::F64), None), evaluated }
}
