//! Gathered weights: their values, and their memory, which units take back.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Device, Int, Tensor};
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, full_model, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::MeshTest;

use super::device;
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

fn net() -> Net {
    let device = Device::flex();
    device.seed(7);
    let net = Net {
        embedding: EmbeddingConfig::new(11, WIDTH).init(&device),
        blocks: (0..BLOCKS).map(|_| LinearConfig::new(WIDTH, WIDTH).init(&device)).collect(),
        head: LinearConfig::new(WIDTH, 3).init(&device),
    };
    let _ = values(&net, None);
    net
}

/// Three-dimensional inputs: burn's `linear` reshapes its weight for them, and the graph keeps that view.
fn forward(net: &Net, tokens: Tensor<2, Int>) -> Tensor<3> {
    unit(net, tokens, |net, tokens| {
        let x = unit(&net.embedding, tokens, |embedding, tokens| embedding.forward(tokens));
        let x = net.blocks.iter().fold(x, |x, block| unit(block, x, |block, x| block.forward(x).tanh()));
        net.head.forward(x)
    })
}

/// What sample `sample` of a step is.
fn tokens(step: usize, sample: usize, device: &Device) -> Tensor<2, Int> {
    let [rows, len] = TOKENS;
    let token = |at: usize| ((at * 7 + step * 3 + sample * 5) % 11) as i32;
    Tensor::<1, Int>::from_data((0..rows * len).map(token).collect::<Vec<_>>().as_slice(), device).reshape(TOKENS)
}

fn loss(net: &Net, tokens: Tensor<2, Int>) -> Tensor<1> {
    (forward(net, tokens) - 0.3).square().mean()
}

fn config() -> FullyShard {
    FullyShard::new().units(["embedding", "blocks.*"]).reshard_after_forward(ReshardAfterForward::Always)
}

fn f32s(tensor: Tensor<1>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Losses of five steps on one CPU with the samples of all ranks, and the weights.
fn reference(ranks: usize) -> (Vec<f32>, Vec<f32>) {
    let device = Device::flex().autodiff();
    let mut model = on_device(&net(), &device);
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..5 {
        let terms = (0..ranks).map(|rank| loss(&model, tokens(step, rank, &device)));
        let mean = terms.reduce(|a, b| a + b).unwrap() / ranks as f32;
        losses.extend(f32s(mean.clone()));
        let grads = GradientsParams::from_grads(mean.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    (losses, values(&model, None).into_values().flatten().collect())
}

#[test]
fn five_sharded_steps_agree_with_one_cpu() {
    for ranks in [2, 3] {
        let (losses, weights) = reference(ranks);
        let trained = MeshTest::new([ranks], ["shard"]).device(device()).run(|mesh| {
            let device = mesh.world().device().clone().autodiff();
            let mut model = fully_shard(on_device(&net(), &device), mesh, config())?;
            let mut optim = AdamWConfig::new().init();
            let mut losses = Vec::new();
            for step in 0..5 {
                let loss = loss(&model, tokens(step, mesh.world().rank(), &device));
                losses.extend(f32s(loss.clone()));
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                model = optim.step(1e-2, model, grads);
            }
            Ok((losses, values(&full_model(&model)?, None).into_values().flatten().collect::<Vec<f32>>()))
        });
        let mean = |step: usize| trained.iter().map(|(losses, _)| losses[step]).sum::<f32>() / ranks as f32;
        let means: Vec<f32> = (0..5).map(mean).collect();
        assert!(furthest(&means, &losses) < 1e-4, "{means:?} {losses:?}");
        for (_, whole) in &trained {
            assert!(furthest(whole, &weights) < 1e-3, "{}", furthest(whole, &weights));
        }
    }
}

/// Bytes of the device in use, once every rank has come here.
fn in_use(mesh: &DeviceMesh) -> burn_dtensor::Result<u64> {
    mesh.world().device().sync().expect("the device works");
    mesh.barrier("used")?;
    let usage = mesh.world().device().memory_pool_usage().expect("a Cube device knows");
    mesh.barrier("read")?;
    Ok(usage.bytes_in_use)
}

#[test]
fn after_forward_no_gathered_weight_is_in_memory() {
    let used = |reshard: ReshardAfterForward| {
        let used = MeshTest::new([2], ["shard"]).device(device()).run(|mesh| {
            let device = mesh.world().device().clone().autodiff();
            let config = FullyShard::new().units(["embedding", "blocks.*"]).reshard_after_forward(reshard);
            let model = fully_shard(on_device(&net(), &device), mesh, config)?;
            let tokens = tokens(0, mesh.world().rank(), &device);
            let mut used = Vec::new();
            for _ in 0..2 {
                used.push(in_use(mesh)?);
                let loss = loss(&model, tokens.clone());
                used.push(in_use(mesh)?);
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                used.push(in_use(mesh)?);
                drop(grads);
            }
            Ok(used)
        });
        used[0].clone()
    };
    let (kept, taken) = (used(ReshardAfterForward::Never), used(ReshardAfterForward::Always));
    println!("{kept:?} {taken:?}");
    panic!();
}
