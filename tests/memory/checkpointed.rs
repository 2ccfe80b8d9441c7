//! Activations of a chain of blocks: kept, or computed again in backward.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::prelude::*;

use crate::live::{self, Measured, alone};

const WIDTH: usize = 32;
const HIDDEN: usize = 8 * WIDTH;
const ROWS: usize = 2048;

/// Bytes of a block's input, and of what is between its layers.
const INPUT: usize = ROWS * WIDTH * 4;
const BETWEEN: usize = ROWS * HIDDEN * 4;
/// Bytes of a block's weights.
const WEIGHTS: usize = (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) * 4;

#[derive(Module, Debug)]
struct Block {
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Block>,
}

impl Net {
    fn new(blocks: usize, device: &Device) -> Self {
        let block = |_| Block {
            up: LinearConfig::new(WIDTH, HIDDEN).init(device),
            down: LinearConfig::new(HIDDEN, WIDTH).init(device),
        };
        Self {
            blocks: (0..blocks).map(block).collect(),
        }
    }

    fn forward(&self, x: Tensor<2>, again: bool) -> Tensor<2> {
        unit(self, x, |net, x| {
            net.blocks.iter().fold(x, |x, block| match again {
                true => checkpoint_activations(block, x, Block::forward),
                false => unit(block, x, Block::forward),
            })
        })
    }
}

impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(self.up.forward(x).tanh()).tanh()
    }
}

fn measure(ranks: usize, blocks: usize, again: bool, checkpointing: bool) -> Measured {
    live::measure(
        ranks,
        checkpointing,
        |world, device| {
            let net = Net::new(blocks, device);
            // Drawn here.
            drop(net.valid());
            let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
            match ranks {
                1 => Ok(net),
                _ => fully_shard(net, &mesh, FullyShard::new().with_units(["blocks.*"])),
            }
        },
        |net, device| {
            net.forward(Tensor::ones([ROWS, WIDTH], device), again)
                .sum()
        },
    )
}

/// What one block more adds after forward, and to what backward holds at most beyond that.
fn of_a_block(ranks: usize, again: bool, checkpointing: bool) -> (usize, usize) {
    const MORE: usize = 4;
    let [few, many] = [2, 2 + MORE].map(|blocks| measure(ranks, blocks, again, checkpointing));
    let after = |measured: Measured| measured.after_forward - measured.before;
    let backward = |measured: Measured| measured.peak_backward - measured.after_forward;
    (
        (after(many) - after(few)) / MORE,
        backward(many).saturating_sub(backward(few)) / MORE,
    )
}

/// What burn's table of graphs takes of a block beside tensors, whatever the tensors' size: of its
/// nodes, and until the next backward of each operation that was computed without a graph.
const NODES: usize = 64 << 10;

#[test]
fn a_block_that_computes_again_keeps_its_input() {
    let _alone = alone();
    for ranks in [1, 2] {
        for checkpointing in [false, true] {
            let (kept, _) = of_a_block(ranks, false, checkpointing);
            let (again, _) = of_a_block(ranks, true, checkpointing);
            let context = format!(
                "{ranks} ranks, gradient checkpointing {checkpointing}: {kept} kept, {again} again"
            );
            println!("{context}");
            assert!(
                (INPUT..INPUT + NODES).contains(&again),
                "{context}, of an input of {INPUT}"
            );
            assert!(kept >= INPUT + BETWEEN, "{context}");
        }
    }
}

/// Backward has one block's activations, their gradients, and the block's weights and gradients,
/// however many blocks there are; what is added are gradients, sharded.
#[test]
fn backward_holds_the_activations_of_one_block() {
    let _alone = alone();
    // Of several ranks' peaks at once only the bound is no matter of time.
    let (_, more) = of_a_block(1, true, false);
    assert!(more < WEIGHTS + NODES, "{more} more with a block more");
    for ranks in [1, 2] {
        let measured = measure(ranks, 6, true, false);
        let most = measured.peak_backward - measured.after_forward;
        // Each of two activations between layers with its gradient, and what an operation makes of
        // it.
        let bound = 5 * BETWEEN + 6 * INPUT + 6 * WEIGHTS;
        println!("{ranks} ranks: backward holds {most} beyond forward, of {bound}");
        assert!(most < bound, "{ranks} ranks: {most} of {bound}");
    }
}
