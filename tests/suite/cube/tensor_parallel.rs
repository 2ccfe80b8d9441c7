//! Tensor parallelism, alone and with sharding.

use std::sync::LazyLock;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::{MeshTest, gpu};

use super::rounding;
use crate::fsdp::support::{furthest, on_device, tensor, values};

#[derive(Module, Debug)]
struct Net {
    up: Linear,
    down: Linear,
}

/// Drawn once: ranks that draw at once share the state of the generator.
static NET: LazyLock<Net> = LazyLock::new(|| {
    let device = Device::flex();
    let net = Net {
        up: LinearConfig::new(6, 10).init(&device),
        down: LinearConfig::new(10, 6).init(&device),
    };
    let _ = values(&net, None);
    net
});

const STEPS: usize = 5;

fn x(step: usize, part: usize, device: &Device) -> Tensor<2> {
    tensor((step * 10 + part) as u64, [3, 6], device)
}

/// Losses and weights after training on one CPU, on the parts of a batch.
fn reference(parts: usize) -> (Vec<f32>, Vec<f32>) {
    let device = Device::flex().autodiff();
    let (mut net, mut optim, mut losses) = (
        on_device(&*NET, &device),
        AdamWConfig::new().init(),
        Vec::new(),
    );
    for step in 0..STEPS {
        let terms = (0..parts).map(|part| {
            net.down
                .forward(net.up.forward(x(step, part, &device)).tanh())
                .square()
                .mean()
        });
        let loss = terms.reduce(|a, b| a + b).expect("a part") / parts as f32;
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net = optim.step(1e-2, net, grads);
    }
    (losses, values(&net, None).into_values().flatten().collect())
}

#[test]
fn columns_and_rows_train_as_on_one_cpu() {
    for replicas in [1, 2] {
        let (losses, weights) = reference(replicas);
        let trained = MeshTest::new([replicas, 2], ["data", "tensor"])
            .with_device(gpu())
            .run(|mesh| {
                let (data, tp) = (mesh.slice(["data"])?, mesh.slice(["tensor"])?);
                let device = mesh.device().clone().autodiff();
                let plan = Plan::new()
                    .with_style("up", Style::colwise())
                    .with_style("down", Style::rowwise());
                let net = parallelize(on_device(&*NET, &device), &tp, plan)?;
                let mut net = fully_shard(net, &data, FullyShard::new())?;
                let (mut optim, mut losses) = (AdamWConfig::new().init(), Vec::new());
                let part = mesh.coordinate().expect("a member")[0];
                for step in 0..STEPS {
                    let x = DTensor::distribute_replicated(
                        x(step, part, &device),
                        &tp,
                        &[Placement::Replicate],
                    )?;
                    let y = unit(&net, x, |net, x| {
                        net.down
                            .forward_dtensor(activation::tanh(net.up.forward_dtensor(x)))
                    });
                    let loss = y.square().mean().full_tensor()?;
                    losses.push(data.all_reduce(loss.clone().into_scalar::<f32>(), ReduceOp::Avg)?);
                    let grads = GradientsParams::from_grads(loss.backward(), &net);
                    net = optim.step(1e-2, net, grads);
                }
                Ok((
                    losses,
                    values(&full_model(&net)?, None)
                        .into_values()
                        .flatten()
                        .collect::<Vec<f32>>(),
                ))
            });
        for (found, full) in &trained {
            assert!(
                furthest(found, &losses) < rounding(1e-4),
                "{found:?} {losses:?}"
            );
            assert!(
                furthest(full, &weights) < rounding(1e-3),
                "{}",
                furthest(full, &weights)
            );
        }
    }
}
