//! A root with three blocks, and the comparison of its passes with and without sharding.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, World, launch};
use burn_dtensor::fsdp::{FullyShard, full_model, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;

use super::support::{Holder, max_diff, mean, on_device, tensor, values};
use crate::launched;

#[derive(Module, Debug)]
pub struct Net {
    pub first: Linear,
    pub blocks: Vec<Linear>,
    pub scale: Param<Tensor<1>>,
    pub spare: Linear,
}

/// How a test runs [`Net`].
pub type Forward = fn(&Net, Tensor<2>, usize) -> Tensor<2>;

pub const WIDTH: usize = 5;

/// The same in every process, whatever else draws random numbers there.
pub fn net(device: &Device) -> Net {
    let linear = |seed| Linear {
        weight: Param::from_tensor(tensor(seed, [WIDTH, WIDTH], device)),
        bias: Some(Param::from_tensor(tensor(seed + 1, [WIDTH], device))),
    };
    Net {
        first: linear(10),
        blocks: [20, 30, 40].map(linear).into(),
        scale: Param::from_tensor(tensor(5, [WIDTH], device)),
        spare: linear(50),
    }
}

pub fn with_units(net: &Net, x: Tensor<2>, _: usize) -> Tensor<2> {
    unit(net, x, |net, x| {
        let mut x = net.first.forward(x);
        for block in &net.blocks {
            x = unit(block, x, |block, x| block.forward(x).tanh());
        }
        x * net.scale.val().unsqueeze()
    })
}

pub fn mesh(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [world.size()], ["shard"])
}

/// Replicas of what `shards` ranks shard.
fn hsdp_mesh(world: &World, shards: usize) -> Result<DeviceMesh> {
    DeviceMesh::new(
        world,
        [world.size() / shards, shards],
        ["replicate", "shard"],
    )
}

pub fn config() -> FullyShard {
    FullyShard::new().with_units(["blocks.*", "spare"])
}

/// Outputs on each rank, and gradients: whole and averaged.
pub fn compare(ranks: usize, prepare: fn(Net) -> Net, config: FullyShard, forward: Forward) {
    compare_on(ranks, mesh, prepare, config, forward);
}

/// Like [`compare`], on replicas of what `shards` ranks shard.
pub fn compare_with_replicas(replicas: usize, shards: usize, config: FullyShard, forward: Forward) {
    compare_on(
        replicas * shards,
        |world| hsdp_mesh(world, shards),
        |net| net,
        config,
        forward,
    );
}

fn compare_on(
    ranks: usize,
    mesh: impl Fn(&World) -> Result<DeviceMesh> + Sync,
    prepare: fn(Net) -> Net,
    config: FullyShard,
    forward: Forward,
) {
    for checkpointing in [false, true] {
        let model = net(&Device::flex());
        let results = launch(Launch::threads(ranks), |world| {
            let device = world.device().clone().autodiff();
            let device = if checkpointing {
                device.gradient_checkpointing()
            } else {
                device
            };
            let plain = prepare(on_device(&model, &device));
            let sharded = fully_shard(plain.clone(), &mesh(world)?, config.clone())?;
            let x = || tensor(world.rank() as u64 + 1, [4, WIDTH], &device);
            let run = |model: &Net| {
                let output = forward(model, x(), world.rank());
                let loss = (output.clone() * output.clone()).sum();
                let grads = GradientsParams::from_grads(loss.backward(), model);
                (output.into_data().try_to_vec::<f32>().unwrap(), grads)
            };
            let (expected, plain_grads) = run(&plain);
            let (output, mut grads) = run(&sharded);
            assert_eq!(output, expected);
            let holder = sharded.clone().map(&mut Holder(&mut grads));
            Ok((
                values(&full_model(&holder)?, None),
                values(&plain, Some(&plain_grads)),
            ))
        })
        .map(launched::values)
        .unwrap();
        let mean = mean(results.iter().map(|(_, expected)| expected));
        for (grads, _) in &results {
            let diff = max_diff(grads, &mean);
            assert!(
                diff < 1e-5,
                "gradients differ by {diff}, checkpointing {checkpointing}"
            );
        }
    }
}
