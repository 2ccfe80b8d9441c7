//! What units leave in the memory of a Cube device.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, DeviceKind, Tensor};
use burn_dtensor::Result;
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::MeshTest;

use crate::live::alone;

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Linear>,
}

const RANKS: usize = 2;
const BLOCKS: usize = 8;
const WIDTH: usize = 256;
/// Bytes of one block's weight.
const WHOLE: u64 = (WIDTH * WIDTH * 4) as u64;

/// Three-dimensional inputs: burn's `linear` reshapes its weight for them, and the graph keeps that view.
fn forward(net: &Net, x: Tensor<3>) -> Tensor<3> {
    net.blocks.iter().fold(x, |x, block| unit(block, x, |block, x| block.forward(x).tanh()))
}

/// Bytes of the device in use, once every rank has come here.
fn in_use(mesh: &DeviceMesh) -> Result<u64> {
    mesh.device().sync().expect("the device works");
    mesh.world().barrier("done")?;
    let usage = mesh.device().memory_pool_usage().expect("a Cube device knows");
    mesh.world().barrier("read")?;
    Ok(usage.bytes_in_use)
}

/// What is in use before forward, after it, and after backward, in each of three steps.
fn steps(reshard: ReshardAfterForward) -> Vec<[u64; 3]> {
    let device = Device::wgpu(DeviceKind::DefaultDevice);
    let mut ranks = MeshTest::new([RANKS], ["shard"]).device(device).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = Net { blocks: (0..BLOCKS).map(|_| LinearConfig::new(WIDTH, WIDTH).init(&device)).collect() };
        let config = FullyShard::new().units(["blocks.*"]).reshard_after_forward(reshard);
        let net = fully_shard(net, mesh, config)?;
        let mut steps = Vec::new();
        for _ in 0..3 {
            let before = in_use(mesh)?;
            let loss = forward(&net, Tensor::ones([1, 4, WIDTH], &device)).sum();
            let between = in_use(mesh)?;
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            steps.push([before, between, in_use(mesh)?]);
            drop(grads);
        }
        Ok(steps)
    });
    ranks.remove(0)
}

#[test]
fn gathered_weights_are_taken_back_under_the_views_that_a_graph_keeps() {
    let _alone = alone();
    let all = (RANKS * BLOCKS) as u64 * WHOLE;
    let (taken, kept) = (steps(ReshardAfterForward::Always), steps(ReshardAfterForward::Never));

    for [before, between, _] in &kept {
        assert!(between - before > all / 2, "this model keeps its weights where it may: {kept:?}");
    }
    for [before, between, after] in &taken {
        // Activations of four rows, and nothing as large as one weight a rank.
        assert!(between - before < RANKS as u64 * WHOLE, "{taken:?}");
        // The shards' gradients are as much as one whole model.
        assert!(after - before < all / RANKS as u64 + RANKS as u64 * WHOLE, "{taken:?}");
    }
}
