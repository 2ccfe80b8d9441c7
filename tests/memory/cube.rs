//! What units leave in the memory of a Cube device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::fsdp::{
    FsdpModule, FullyShard, OffloadPolicy, ReshardAfterForward, fully_shard, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::{MeshTest, gpu};
use burn_dtensor::{Error, Result};

use crate::live::alone;

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Linear>,
}

const RANKS: usize = 2;
const BLOCKS: usize = 8;
const WIDTH: usize = 256;
/// Bytes of one block's weight.
const FULL: u64 = (WIDTH * WIDTH * 4) as u64;

/// Three-dimensional inputs: burn's `linear` reshapes its weight for them, and the graph keeps that
/// view.
fn forward(net: &Net, x: Tensor<3>) -> Tensor<3> {
    net.blocks.iter().fold(x, |x, block| {
        unit(block, x, |block, x| block.forward(x).tanh())
    })
}

/// Bytes of the device in use, once every rank has come here.
fn in_use(mesh: &DeviceMesh) -> Result<u64> {
    mesh.device().sync().expect("the device works");
    mesh.world().barrier("done")?;
    let usage = mesh
        .device()
        .memory_pool_usage()
        .expect("a Cube device knows");
    mesh.world().barrier("read")?;
    Ok(usage.bytes_in_use)
}

/// What is in use before forward, after it, and after backward, in each of three steps.
fn steps(reshard: ReshardAfterForward) -> Vec<[u64; 3]> {
    let mut ranks = MeshTest::new([RANKS], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let net = Net {
                blocks: (0..BLOCKS)
                    .map(|_| LinearConfig::new(WIDTH, WIDTH).init(&device))
                    .collect(),
            };
            let config = FullyShard::new()
                .with_units(["blocks.*"])
                .with_reshard_after_forward(reshard);
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
    let all = (RANKS * BLOCKS) as u64 * FULL;
    let (taken, kept) = (
        steps(ReshardAfterForward::Always),
        steps(ReshardAfterForward::Never),
    );

    for [before, between, _] in &kept {
        assert!(
            between - before > all / 2,
            "this model keeps its weights where it may: {kept:?}"
        );
    }
    for [before, between, after] in &taken {
        // Activations of four rows, and nothing as large as one weight a rank.
        assert!(between - before < RANKS as u64 * FULL, "{taken:?}");
        // The shards' gradients are as much as one whole model.
        assert!(
            after - before < all / RANKS as u64 + RANKS as u64 * FULL,
            "{taken:?}"
        );
    }
}

/// Most that is in use in the backwards of two steps of AdamW, after one before them, and what is
/// after each.
fn trained(ranks: usize, offload: OffloadPolicy) -> (u64, [u64; 2]) {
    let mut results = MeshTest::new([ranks], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let start = if offload == OffloadPolicy::Cpu {
                Device::flex().autodiff()
            } else {
                device.clone()
            };
            let net = Net {
                blocks: (0..BLOCKS)
                    .map(|_| LinearConfig::new(WIDTH, WIDTH).init(&start))
                    .collect(),
            };
            let config = FullyShard::new()
                .with_units(["blocks.*"])
                .with_reshard_after_forward(ReshardAfterForward::Always);
            let mut net = fully_shard(net, mesh, config.with_offload(offload))?;
            let mut optim = AdamWConfig::new().init();
            let mut step = |net: Net| {
                let loss = forward(&net, Tensor::ones([1, 4, WIDTH], &device)).sum();
                let grads = GradientsParams::from_grads(loss.backward(), &net);
                let net = optim.step(1e-3, net, grads);
                Ok::<_, Error>((in_use(mesh)?, net))
            };
            // The device gives back what others have used meanwhile.
            (_, net) = step(net)?;
            let most = Arc::new(AtomicU64::new(0));
            let (seen, of) = (most.clone(), mesh.device().clone());
            FsdpModule::of(&net)?.set_all_reduce_hook(move |reduced| {
                of.sync().expect("the device works");
                seen.fetch_max(
                    of.memory_pool_usage()
                        .expect("a Cube device knows")
                        .bytes_in_use,
                    Relaxed,
                );
                Ok(reduced.shards)
            });
            let (first, net) = step(net)?;
            let (second, _) = step(net)?;
            Ok((most.load(Relaxed), [first, second]))
        });
    results.remove(0)
}

/// One rank has weights of its own, too, which it frees.
#[test]
fn the_device_has_open_units_alone_where_shards_are_offloaded() {
    let _alone = alone();
    for ranks in [1, RANKS] {
        let all = BLOCKS as u64 * FULL;
        let (kept, (most, after)) = (
            trained(ranks, OffloadPolicy::Never),
            trained(ranks, OffloadPolicy::Cpu),
        );
        // Parameters and AdamW's two moments.
        assert!(kept.1.iter().all(|after| *after >= 3 * all), "{kept:?}");
        // Nothing as large as one weight.
        assert!(after.iter().all(|after| *after < FULL), "{after:?}");
        // A rank has the weights of a unit and of the one before it, gradients of both, and parts
        // that are on their way.
        assert!(most < ranks as u64 * 5 * FULL, "{most}");
    }
}
