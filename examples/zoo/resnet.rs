//! ResNet: residual blocks of convolutions and batch norms, which learn to classify synthetic
//! patterns.

use std::ops::Range;

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::optim::ModuleOptimizer;
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn_dtensor::optim::ShardedOptimizer;
use burn_dtensor::prelude::*;

use crate::images::Images;
use crate::plans;
use crate::task::{Task, mean_cross_entropy};

/// Sizes of a [`ResNet`].
#[derive(Debug, Clone)]
pub struct ResNetConfig {
    /// Number of blocks of each stage.
    pub blocks: Vec<usize>,
    /// Channels of the first stage. Each following stage has twice as many.
    pub channels: usize,
    pub classes: usize,
    /// Height and width of images.
    pub side: usize,
}

/// A stem, stages of blocks, and a linear head.
#[derive(Module, Debug)]
pub struct ResNet {
    stem: Conv,
    pool: MaxPool2d,
    stages: Vec<Vec<Block>>,
    mean: AdaptiveAvgPool2d,
    head: Linear,
}

/// Two convolutions of 3 x 3, and a shortcut.
#[derive(Module, Debug)]
pub struct Block {
    first: Conv,
    second: Conv,
    /// Convolution of the shortcut, if the block changes the shape.
    shortcut: Option<Conv>,
}

/// A convolution and its norm.
#[derive(Module, Debug)]
pub struct Conv {
    conv: Conv2d,
    norm: BatchNorm,
}

impl Conv {
    fn init([from, to]: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Self {
        let pad = kernel / 2;
        let conv = Conv2dConfig::new([from, to], [kernel, kernel])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
            .with_bias(false);
        Self {
            conv: conv.init(device),
            norm: BatchNormConfig::new(to).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}

impl ResNetConfig {
    /// Returns ResNet-18 of the paper: 11.7 M parameters for 1000 classes.
    pub fn base() -> Self {
        Self {
            blocks: vec![2, 2, 2, 2],
            channels: 64,
            classes: 1000,
            side: 64,
        }
    }

    /// Returns a model that trains in seconds. Lengths are odd where possible, so that shards are
    /// uneven.
    pub fn tiny() -> Self {
        Self {
            blocks: vec![1, 2],
            channels: 5,
            classes: 7,
            side: 13,
        }
    }

    /// Creates the model with its parameters on `device`. Each parameter is initialized on first
    /// use.
    pub fn init(&self, device: &Device) -> ResNet {
        let mut from = self.channels;
        let mut stage = |(stage, &blocks): (usize, &usize)| {
            let to = self.channels << stage;
            let block = |block| {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let shape = [std::mem::replace(&mut from, to), to];
                Block {
                    first: Conv::init(shape, 3, stride, device),
                    second: Conv::init([to, to], 3, 1, device),
                    shortcut: (shape[0] != to).then(|| Conv::init(shape, 1, stride, device)),
                }
            };
            (0..blocks).map(block).collect()
        };
        let stages: Vec<Vec<Block>> = self.blocks.iter().enumerate().map(&mut stage).collect();
        ResNet {
            stem: Conv::init([3, self.channels], 7, 2, device),
            pool: MaxPool2dConfig::new([3, 3])
                .with_strides([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(),
            stages,
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(from, self.classes).init(device),
        }
    }
}

impl ResNet {
    /// Returns logits `[batch, classes]` of images `[batch, 3, height, width]`.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        unit(self, images, |net, images| {
            let x = net.pool.forward(relu(net.stem.forward(images)));
            let blocks = net.stages.iter().flatten();
            let x = blocks.fold(x, |x, block| {
                checkpoint_activations(block, x, |block, x| block.forward(x))
            });
            net.head.forward(net.mean.forward(x).flatten(1, 3))
        })
    }
}

impl Block {
    /// Runs the block on `x` `[batch, channels, height, width]`. A block with a stride halves
    /// height and width.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let shortcut = self
            .shortcut
            .as_ref()
            .map_or(x.clone(), |conv| conv.forward(x.clone()));
        relu(self.second.forward(relu(self.first.forward(x))) + shortcut)
    }
}

impl Task for ResNet {
    type Data = Images;

    fn loss(
        &self,
        images: &Images,
        (seed, step): (u64, usize),
        rows: Range<usize>,
        device: &Device,
    ) -> Tensor<1> {
        let (x, classes) = images.batch((seed, step), rows, device);
        mean_cross_entropy(self.forward(x).unsqueeze_dim(1), classes.unsqueeze_dim(1))
    }

    const DIMS: &'static [&'static str] = &["shard"];

    fn parallel(self, mesh: &DeviceMesh) -> Result<Self> {
        plans::resnet(self, mesh)
    }

    fn optimizers() -> (ShardedOptimizer, ModuleOptimizer) {
        plans::momentum()
    }
}
