//! Gathered weights: their values, and their memory, which units take back.

use std::sync::LazyLock;

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, full_model, fully_shard, unit};
use burn_dtensor::testing::{MeshTest, gpu};

use super::rounding;
use crate::fsdp::support::{furthest, on_device, values};

#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    blocks: Vec<Linear>,
    head: Linear,
}

const WIDTH: usize = 64;
const BLOCKS: usize = 6;
const TOKENS: [usize; 2] = [4, 5];

/// The weights of every test: drawn once, since ranks that draw at once share the state of the
/// generator.
static NET: LazyLock<Net> = LazyLock::new(|| {
    let device = Device::flex();
    device.seed(7);
    let net = Net {
        embedding: EmbeddingConfig::new(11, WIDTH).init(&device),
        blocks: (0..BLOCKS)
            .map(|_| LinearConfig::new(WIDTH, WIDTH).init(&device))
            .collect(),
        head: LinearConfig::new(WIDTH, 3).init(&device),
    };
    let _ = values(&net, None);
    net
});

/// Three-dimensional inputs: burn's `linear` reshapes its weight for them, and the graph keeps that
/// view.
fn forward(net: &Net, tokens: Tensor<2, Int>) -> Tensor<3> {
    unit(net, tokens, |net, tokens| {
        let x = unit(&net.embedding, tokens, |embedding, tokens| {
            embedding.forward(tokens)
        });
        let x = net.blocks.iter().fold(x, |x, block| {
            unit(block, x, |block, x| block.forward(x).tanh())
        });
        net.head.forward(x)
    })
}

/// What sample `sample` of a step is.
fn tokens(step: usize, sample: usize, device: &Device) -> Tensor<2, Int> {
    let [rows, len] = TOKENS;
    let token = |at: usize| ((at * 7 + step * 3 + sample * 5) % 11) as i32;
    Tensor::<1, Int>::from_data(
        (0..rows * len).map(token).collect::<Vec<_>>().as_slice(),
        device,
    )
    .reshape(TOKENS)
}

fn loss(net: &Net, tokens: Tensor<2, Int>) -> Tensor<1> {
    (forward(net, tokens) - 0.3).square().mean()
}

fn config() -> FullyShard {
    FullyShard::new()
        .with_units(["embedding", "blocks.*"])
        .with_reshard_after_forward(ReshardAfterForward::Always)
}

fn f32s(tensor: Tensor<1>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Losses of five steps on one CPU with the samples of all ranks, and the weights.
fn reference(ranks: usize) -> (Vec<f32>, Vec<f32>) {
    let device = Device::flex().autodiff();
    let mut model = on_device(&*NET, &device);
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..5 {
        let terms = (0..ranks).map(|rank| loss(&model, tokens(step, rank, &device)));
        let mean = terms.reduce(|a, b| a + b).unwrap() / ranks as f32;
        losses.extend(f32s(mean.clone()));
        let grads = GradientsParams::from_grads(mean.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    (
        losses,
        values(&model, None).into_values().flatten().collect(),
    )
}

#[test]
fn five_sharded_steps_agree_with_one_cpu() {
    for ranks in [2, 3] {
        let (losses, weights) = reference(ranks);
        let trained = MeshTest::new([ranks], ["shard"])
            .with_device(gpu())
            .run(|mesh| {
                let device = mesh.world().device().clone().autodiff();
                let mut model = fully_shard(on_device(&*NET, &device), mesh, config())?;
                let mut optim = AdamWConfig::new().init();
                let mut losses = Vec::new();
                for step in 0..5 {
                    let loss = loss(&model, tokens(step, mesh.world().rank(), &device));
                    losses.extend(f32s(loss.clone()));
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    model = optim.step(1e-2, model, grads);
                }
                Ok((
                    losses,
                    values(&full_model(&model)?, None)
                        .into_values()
                        .flatten()
                        .collect::<Vec<f32>>(),
                ))
            });
        let mean = |step: usize| {
            trained.iter().map(|(losses, _)| losses[step]).sum::<f32>() / ranks as f32
        };
        let means: Vec<f32> = (0..5).map(mean).collect();
        assert!(
            furthest(&means, &losses) < rounding(1e-4),
            "{means:?} {losses:?}"
        );
        for (_, full) in &trained {
            assert!(
                furthest(full, &weights) < rounding(1e-3),
                "{}",
                furthest(full, &weights)
            );
        }
    }
}

/// The first block's weight, kept past its unit.
fn kept(net: &Net, x: Tensor<3>) -> (Tensor<2>, Tensor<3>) {
    let mut kept = None;
    let y = unit(&net.blocks[0], x, |block, x| {
        kept = Some(block.weight.val());
        block.forward(x)
    });
    (kept.expect("set in forward"), y)
}

#[test]
fn a_weight_that_was_taken_back_is_an_error_and_after_backward_what_it_was() {
    let expected = NET.blocks[0].weight.val().into_data();
    MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = fully_shard(on_device(&*NET, &device), mesh, config())?;
            let (weight, y) = kept(&model, Tensor::ones([1, 2, WIDTH], &device));
            let _ = y.sum().backward();
            assert_eq!(weight.into_data(), expected);
            Ok(())
        });
    let failure = MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run_failing(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = fully_shard(on_device(&*NET, &device), mesh, config())?;
            let (weight, y) = kept(&model, Tensor::ones([1, 2, WIDTH], &device));
            let read = (weight * 2.0).into_data();
            let _ = y.sum().backward();
            Ok(read)
        });
    let text = failure.to_string();
    assert!(text.contains("different allocation"), "{text}");
}

/// One rank holds all of a parameter of one row. What is gathered of it is no memory of that rank's
/// shard, or it would be taken back with the unit.
#[test]
fn a_shard_that_is_the_full_parameter_outlives_its_unit() {
    MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let row = LinearConfig::new(1, 3).with_bias(false).init(&device);
            let model = fully_shard(row, mesh, config_of_all())?;
            let step = || {
                let y = unit(&model, Tensor::<3>::ones([1, 2, 1], &device), |model, x| {
                    model.forward(x)
                });
                let value = y.clone().inner().into_data();
                let _ = y.sum().backward();
                value
            };
            assert_eq!(step(), step());
            Ok(())
        });
}

fn config_of_all() -> FullyShard {
    FullyShard::new().with_reshard_after_forward(ReshardAfterForward::Always)
}

#[test]
fn a_weight_may_leave_its_unit_as_an_output() {
    MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = fully_shard(on_device(&*NET, &device), mesh, config())?;
            let weight = unit(&model.blocks[0], (), |block, ()| block.weight.val());
            let sum = unit(&model.blocks[1], (), |block, ()| {
                block.weight.val().detach()
            });
            let [first, second] = [0, 1].map(|block| NET.blocks[block].weight.val().into_data());
            assert_eq!((weight.into_data(), sum.into_data()), (first, second));
            Ok(())
        });
}

#[test]
fn another_thread_may_run_backward() {
    MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = fully_shard(on_device(&*NET, &device), mesh, config())?;
            let plain = on_device(&*NET, &device);
            let tokens = tokens(0, 0, &device);
            let grads =
                |model: &Net, loss: Tensor<1>| GradientsParams::from_grads(loss.backward(), model);
            let expected = grads(&plain, loss(&plain, tokens.clone()));
            let sharded = loss(&model, tokens);
            let found = std::thread::scope(|scope| {
                scope
                    .spawn(|| grads(&model, sharded))
                    .join()
                    .expect("backward")
            });
            let full = plain.blocks[2].weight.clone();
            let full = expected.get::<2>(full.id).expect("trained");
            let rank = mesh.world().rank();
            let part = full.slice_dim(0, rank * WIDTH / 2..(rank + 1) * WIDTH / 2);
            let found = found.get::<2>(model.blocks[2].weight.id).expect("trained");
            let far = (found - part).abs().max().into_scalar::<f32>();
            assert!(far < 1e-6, "{far}");
            Ok(())
        });
}
