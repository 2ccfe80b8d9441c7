//! Blocks that compute again in backward: as if they had kept their activations, to the bit.

mod composition;
mod event_order;
mod misuse;
mod parity;
mod rng;
mod tensor_parallel;
mod unsharded;

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, Linear};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::fsdp::{FullyShard, checkpoint_activations, full_model, unit};
use burn_dtensor::nn::dropout;

use super::support::{Holder, tensor, values};

/// No two ranks share it evenly.
const WIDTH: usize = 5;
const BLOCKS: usize = 3;

#[derive(Module, Debug)]
struct Tower {
    first: Linear,
    blocks: Vec<Block>,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    up: Linear,
    feed: Feed,
    dropout: Dropout,
}

/// A unit inside a unit.
#[derive(Module, Debug)]
struct Feed {
    down: Linear,
}

/// How a block runs.
#[derive(Debug, Clone, Copy, Default)]
struct How {
    checkpointed: bool,
    /// The unit inside.
    inner: bool,
    drops: Drops,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum Drops {
    #[default]
    Nothing,
    /// By the crate's stream.
    Own,
    /// By burn's state.
    Burns,
}

const KEPT: How = How {
    checkpointed: false,
    inner: false,
    drops: Drops::Nothing,
};
const RECOMPUTED: How = How {
    checkpointed: true,
    ..KEPT
};
/// Every way in which something computes again.
const WAYS: [How; 3] = [
    RECOMPUTED,
    How {
        inner: true,
        ..KEPT
    },
    How {
        inner: true,
        ..RECOMPUTED
    },
];

impl How {
    fn drops(self, drops: Drops) -> Self {
        Self { drops, ..self }
    }
}

fn linear(seed: u64, device: &Device) -> Linear {
    Linear {
        weight: Param::from_tensor(tensor(seed, [WIDTH, WIDTH], device)),
        bias: Some(Param::from_tensor(tensor(seed + 1, [WIDTH], device))),
    }
}

impl Tower {
    fn new(device: &Device) -> Self {
        let block = |at| Block {
            up: linear(100 + 10 * at, device),
            feed: Feed {
                down: linear(200 + 10 * at, device),
            },
            dropout: DropoutConfig::new(0.3).init(),
        };
        let blocks = (0..BLOCKS as u64).map(block).collect();
        Self {
            first: linear(10, device),
            blocks,
            head: linear(20, device),
        }
    }

    fn forward(&self, x: Tensor<2>, how: How) -> Tensor<2> {
        unit(self, x, |tower, x| {
            let x = tower.first.forward(x);
            let x = tower
                .blocks
                .iter()
                .fold(x, |x, block| block.forward(x, how));
            tower.head.forward(x)
        })
    }
}

impl Block {
    fn forward(&self, x: Tensor<2>, how: How) -> Tensor<2> {
        match how.checkpointed {
            true => checkpoint_activations(self, x, move |block, x| block.compute(x, how)),
            false => unit(self, x, |block, x| block.compute(x, how)),
        }
    }

    fn compute(&self, x: Tensor<2>, how: How) -> Tensor<2> {
        let y = self.up.forward(x.clone()).tanh();
        let y = match how.drops {
            Drops::Nothing => y,
            Drops::Own => dropout(y, 0.3),
            Drops::Burns => self.dropout.forward(y),
        };
        let y = match how.inner {
            true => checkpoint_activations(&self.feed, y, |feed, y| feed.down.forward(y).tanh()),
            false => unit(&self.feed, y, |feed, y| feed.down.forward(y).tanh()),
        };
        x + y
    }
}

fn config() -> FullyShard {
    FullyShard::new().with_units(["blocks.*", "blocks.*.feed"])
}

fn batch(seed: u64, device: &Device) -> Tensor<2> {
    tensor(seed, [3, WIDTH], device)
}

/// Whole gradients, averaged over ranks where the model is sharded.
fn full_grads<M: Module>(model: &M, loss: Tensor<1>) -> Result<BTreeMap<String, Vec<f32>>> {
    let mut grads = GradientsParams::from_grads(loss.backward(), model);
    Ok(values(
        &full_model(&model.clone().map(&mut Holder(&mut grads)))?,
        None,
    ))
}
