//! Memory of a training whose parameters are stepped in backward.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;

use crate::live::{allocates_for, alone, apart, own, own_peak, restart_peak};

const WIDTH: usize = 256;
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
fn peak(inside: bool, blocks: usize) -> usize {
    let peaks = launch(apart(RANKS), |world| {
        allocates_for(world.rank());
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let device = world.device().clone().autodiff();
        let before = own();
        let block = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
        let net = Net {
            blocks: (0..blocks).map(block).collect(),
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

/// Each further block takes its shards and AdamW's state of them, three times the shards. A backward
/// and a step after it add its gradients; steps in backward do not.
#[test]
fn gradients_of_all_shards_are_never_there_together() {
    let _alone = alone();
    let of_block = |inside| {
        let [few, many] = [8, 24].map(|blocks| peak(inside, blocks));
        (many - few) as f64 / (16 * SHARDS) as f64
    };
    let [after, inside] = [false, true].map(of_block);
    println!("a block takes {after:.2} and {inside:.2} times its shards");
    assert!((4.0..4.4).contains(&after), "{after}");
    assert!((3.0..3.45).contains(&inside), "{inside}");
}
