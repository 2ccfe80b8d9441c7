//! A residual network whose batch ranks share, unevenly and with none for some: losses, weights and
//! running statistics of ten steps are those of one device on the whole batch.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_dtensor::dtensor::ops::{activation, loss::cross_entropy};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::{floats, near};
use crate::fsdp::support::{max_diff, on_device, tensor, values};

use Placement::{Replicate as R, Shard as S};

const STEPS: usize = 10;
const CLASSES: usize = 5;

#[derive(Module, Debug)]
struct ResNet {
    stem: Conv2d,
    norm: BatchNorm,
    pool: MaxPool2d,
    blocks: Vec<BasicBlock>,
    average: AdaptiveAvgPool2d,
    head: Linear,
}

#[derive(Module, Debug)]
struct BasicBlock {
    first: Conv2d,
    first_norm: BatchNorm,
    second: Conv2d,
    second_norm: BatchNorm,
    shortcut: Option<Conv2d>,
}

/// No biases before a `BatchNorm`: their gradients are zero but for rounding, which AdamW would
/// make steps of.
fn conv(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Conv2d {
    let config = Conv2dConfig::new(channels, [kernel; 2])
        .with_stride([stride; 2])
        .with_bias(false);
    config
        .with_padding(PaddingConfig2d::Explicit(
            kernel / 2,
            kernel / 2,
            kernel / 2,
            kernel / 2,
        ))
        .init(device)
}

fn resnet() -> ResNet {
    let device = &Device::flex();
    device.seed(3);
    let block = |[taken, made]: [usize; 2], stride| BasicBlock {
        first: conv([taken, made], 3, stride, device),
        first_norm: BatchNormConfig::new(made).init(device),
        second: conv([made, made], 3, 1, device),
        second_norm: BatchNormConfig::new(made).init(device),
        shortcut: (taken != made).then(|| conv([taken, made], 1, stride, device)),
    };
    let net = ResNet {
        stem: conv([3, 4], 3, 1, device),
        norm: BatchNormConfig::new(4).init(device),
        pool: MaxPool2dConfig::new([2, 2]).init(),
        blocks: vec![block([4, 4], 1), block([4, 6], 2)],
        average: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
        head: LinearConfig::new(6, CLASSES).init(device),
    };
    let _ = values(&net, None); // Draw now, on one thread.
    net
}

/// The model's forward, of tensors of either kind.
macro_rules! forward {
    ($name:ident, $Tensor:ident, $forward:ident, $relu:path) => {
        impl ResNet {
            /// Images `[batch, 3, height, width]` to `[batch, classes]`.
            fn $name(&self, x: $Tensor<4>) -> $Tensor<2> {
                unit(self, x, |net, x| {
                    let x = net
                        .pool
                        .$forward($relu(net.norm.$forward(net.stem.$forward(x))));
                    let x = net
                        .blocks
                        .iter()
                        .fold(x, |x, block| unit(block, x, |block, x| block.$name(x)));
                    net.head
                        .$forward(net.average.$forward(x).flatten::<2>(1, 3))
                })
            }
        }

        impl BasicBlock {
            fn $name(&self, x: $Tensor<4>) -> $Tensor<4> {
                let y = $relu(self.first_norm.$forward(self.first.$forward(x.clone())));
                let y = self.second_norm.$forward(self.second.$forward(y));
                let x = match &self.shortcut {
                    Some(shortcut) => shortcut.$forward(x),
                    None => x,
                };
                $relu(x + y)
            }
        }
    };
}

forward!(plain, Tensor, forward, relu);
forward!(parallel, DTensor, forward_dtensor, activation::relu);

/// Images and classes, of which some batches have more of one.
fn batch(step: usize, images: usize, device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    let classes: Vec<i64> = (0..images)
        .map(|image| ((image * 3 + step * step) % CLASSES) as i64)
        .collect();
    (
        tensor(40 + step as u64, [images, 3, 6, 6], device),
        Tensor::from_data(TensorData::new(classes, [images]), device),
    )
}

fn entropy(logits: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
    log_softmax(logits, 1)
        .gather(1, classes.unsqueeze_dim::<2>(1))
        .mean()
        .neg()
}

fn running(net: &ResNet) -> Vec<f32> {
    let blocks = net
        .blocks
        .iter()
        .flat_map(|block| [&block.first_norm, &block.second_norm]);
    let norms = std::iter::once(&net.norm).chain(blocks);
    let states = norms.flat_map(|norm| {
        [
            norm.running_mean.value_sync(),
            norm.running_var.value_sync(),
        ]
    });
    states.flat_map(|state| floats(state.inner())).collect()
}

struct Trained {
    losses: Vec<f32>,
    model: ResNet,
    running: Vec<f32>,
}

/// On one device, each step on the batches of these numbers of images: one forward each, and their
/// mean.
fn expected(net: &ResNet, images: usize, groups: usize) -> Trained {
    let device = Device::flex().autodiff();
    let mut model = on_device(net, &device);
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = |group| {
            let (x, classes) = batch(step + 20 * group, images, &device);
            entropy(model.plain(x), classes)
        };
        let loss = (0..groups).map(loss).reduce(|a, b| a + b).expect("a group") / groups as f32;
        losses.push(loss.clone().inner().into_scalar::<f32>());
        model = optim.step(
            1e-2,
            model.clone(),
            GradientsParams::from_grads(loss.backward(), &model),
        );
    }
    Trained {
        losses,
        running: running(&model),
        model,
    }
}

/// The same steps with each group's batch laid out as `layout` over its `batch` ranks.
fn train(
    mut model: ResNet,
    images: usize,
    layout: &Layout,
    mesh: &DeviceMesh,
    group: usize,
) -> Result<(Vec<f32>, ResNet)> {
    let shared = mesh.slice("batch")?;
    let device = mesh.device().clone().autodiff();
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (x, classes) = batch(step + 20 * group, images, &device);
        let x = DTensor::distribute_replicated_to(x, &shared, layout.clone())?;
        let classes = DTensor::distribute_replicated_to(classes, &shared, layout.clone())?;
        let loss = cross_entropy(model.parallel(x), classes).full_tensor()?;
        losses.push(mesh.all_reduce(loss.clone().inner().into_scalar::<f32>(), ReduceOp::Avg)?);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    Ok((losses, model))
}

fn hold(expected: &Trained, losses: &[f32], model: &ResNet, what: &str) -> Result<()> {
    for (step, (found, expected)) in losses.iter().zip(&expected.losses).enumerate() {
        assert!(
            (found - expected).abs() < 1e-4,
            "{what}, step {step}: loss {found}, expected {expected}"
        );
    }
    let off = max_diff(
        &values(&full_model(model)?, None),
        &values(&expected.model, None),
    );
    assert!(off < 1e-3, "{what}: weights are {off} off");
    Ok(())
}

#[test]
fn a_batch_may_be_shared_unevenly_and_leave_ranks_without_images() {
    let net = resnet();
    for (images, lengths) in [(7, None), (7, Some([4, 0, 3])), (2, None)] {
        let expected = expected(&net, images, 1);
        MeshTest::new([3], ["batch"]).run(|mesh| {
            let even = Layout::new(mesh.shape(), &[S(0)])?;
            let layout = match lengths {
                Some(lengths) => even.with_uneven_sizes(0, lengths.to_vec())?,
                None => even,
            };
            // Weights on all ranks, and cut over the ranks that share the batch.
            for weights in [R, S(0)] {
                let plan = Plan::new()
                    .with_style("**.weight", weights)
                    .with_units(["blocks.*"]);
                let model = parallelize(
                    on_device(&net, &mesh.device().clone().autodiff()),
                    mesh,
                    plan,
                )?;
                let (losses, model) = train(model, images, &layout, mesh, 0)?;
                let what = format!("{images} images as {layout}, weights {weights}");
                hold(&expected, &losses, &model, &what)?;
                let found = running(&model);
                near(&found, &expected.running, || {
                    format!("{what}: running statistics")
                });
                // To the bit the same on all ranks.
                let sum = found.iter().fold(0u64, |sum, value| {
                    sum.rotate_left(7) ^ u64::from(value.to_bits())
                });
                let bits = (sum >> 16) as f64;
                let [least, greatest] =
                    [ReduceOp::Min, ReduceOp::Max].map(|op| mesh.all_reduce(bits, op));
                assert_eq!(least?, greatest?, "{what}");
            }
            Ok(())
        });
    }
}

/// Each group of ranks that share a batch has the statistics of that batch.
#[test]
fn fully_sharded_groups_share_a_batch_each() {
    let net = resnet();
    let expected = expected(&net, 3, 2);
    MeshTest::new([2, 2], ["shard", "batch"]).run(|mesh| {
        let model = on_device(&net, &mesh.device().clone().autodiff());
        let model = parallelize(model, &mesh.slice("batch")?, Plan::new())?;
        let model = fully_shard(
            model,
            &mesh.slice("shard")?,
            FullyShard::new().with_units(["blocks.*"]),
        )?;
        let layout = Layout::new(&[2], &[S(0)])?;
        let group = mesh.coordinate().expect("a member")[0];
        let (losses, model) = train(model, 3, &layout, mesh, group)?;
        hold(&expected, &losses, &model, "groups of two")
    });
}
