//! Memory of a training whose parameters are stepped in backward.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;

use crate::live::{allocates_for, alone, apart, own, own_peak, restart_peak};

const WIDTH: usize = 256;
const BLOCKS: usize = 16;
const RANKS: usize = 2;
/// Bytes of this rank's shards of a block.
const SHARDS: usize = (WIDTH * WIDTH + WIDTH) * 4 / RANKS;

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Linear>,
}

impl Net {
    fn loss(&self, device: &Device) -> Tensor<1> {
        let x = Tensor::<2>::ones([1, WIDTH], device);
        unit(self, x, |net, x| {
            let block = |x, block: &Linear| unit(block, x, |block, x| block.forward(x).tanh());
            net.blocks.iter().fold(x, block)
        })
        .sum()
    }
}

/// Bytes that the last of three steps of a rank holds at most, above what it held before it had a model.
fn peak(inside: bool) -> usize {
    let peaks = launch(apart(RANKS), |world| {
        allocates_for(world.rank());
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let device = world.device().clone().autodiff();
        let before = own();
        let block = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
        let net = Net {
            blocks: (0..BLOCKS).map(block).collect(),
        };
        let config = FullyShard::new().with_units(["blocks.*"]);
        let mut net = fully_shard(net, &mesh, config)?;
        let mut optim = sharded(AdamWConfig::new());
        for _ in 0..3 {
            world.barrier("next")?;
            restart_peak();
            let loss = net.loss(&device);
            net = match inside {
                true => optim.backward(1e-3, net, loss)?,
                false => {
                    let grads = GradientsParams::from_grads(loss.backward(), &net);
                    optim.step(1e-3, net, grads)?
                }
            };
        }
        Ok(own_peak() - before)
    });
    let peaks = peaks.unwrap();
    peaks
        .into_iter()
        .map(|(_, peak)| peak)
        .max()
        .expect("two ranks")
}

/// Shards and the state of AdamW are three times the shards. A backward and a step after it add the
/// gradients of all; steps in backward those of the blocks in reduction and in computation.
#[test]
fn gradients_of_all_shards_are_never_there_together() {
    let _alone = alone();
    let [after, inside] = [false, true].map(peak);
    let all = BLOCKS * SHARDS;
    let of_shards = |bytes: usize| bytes as f64 / all as f64;
    println!(
        "peaks of {:.2} and {:.2} times the shards",
        of_shards(after),
        of_shards(inside)
    );
    assert!(after > 4 * all, "{:.2}", of_shards(after));
    assert!(
        inside < after - all / 2,
        "{:.2} and {:.2}",
        of_shards(inside),
        of_shards(after)
    );
    // The state, and of few blocks the gathered weights, their gradients and a step.
    assert!(inside < 3 * all + 16 * SHARDS, "{:.2}", of_shards(inside));
}
