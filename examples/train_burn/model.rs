//! The model of burn's guide. Only [`unit`] is new.

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{Gelu, Linear, LinearConfig};
use burn::prelude::*;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use burn_dtensor::prelude::unit;

use crate::shapes::ShapeBatch;

#[derive(Module, Debug)]
pub struct Model {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: AdaptiveAvgPool2d,
    linear1: Linear,
    linear2: Linear,
    activation: Gelu,
}

#[derive(Config, Debug)]
pub struct ModelConfig {
    num_classes: usize,
    hidden_size: usize,
}

impl ModelConfig {
    /// Returns the initialized model.
    pub fn init(&self, device: &Device) -> Model {
        Model {
            conv1: Conv2dConfig::new([1, 8], [3, 3]).init(device),
            conv2: Conv2dConfig::new([8, 16], [3, 3]).init(device),
            pool: AdaptiveAvgPool2dConfig::new([4, 4]).init(),
            linear1: LinearConfig::new(16 * 4 * 4, self.hidden_size).init(device),
            linear2: LinearConfig::new(self.hidden_size, self.num_classes).init(device),
            activation: Gelu::new(),
        }
    }
}

impl Model {
    /// `[batch, height, width]` to `[batch, classes]`.
    pub fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        unit(self, images, |model, images| {
            let [batch_size, height, width] = images.dims();
            let x = images.reshape([batch_size, 1, height, width]);
            let x = model.activation.forward(model.conv1.forward(x));
            let x = model.activation.forward(model.conv2.forward(x));
            let x = model.pool.forward(x).reshape([batch_size, 16 * 4 * 4]);
            model
                .linear2
                .forward(model.activation.forward(model.linear1.forward(x)))
        })
    }

    fn forward_classification(
        &self,
        images: Tensor<3>,
        targets: Tensor<1, Int>,
    ) -> ClassificationOutput {
        let output = self.forward(images);
        let loss = CrossEntropyLossConfig::new()
            .init(&output.device())
            .forward(output.clone(), targets.clone());
        ClassificationOutput::new(loss, output, targets)
    }
}

impl TrainStep for Model {
    type Input = ShapeBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: ShapeBatch) -> TrainOutput<ClassificationOutput> {
        let item = self.forward_classification(batch.images, batch.targets);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Model {
    type Input = ShapeBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: ShapeBatch) -> ClassificationOutput {
        self.forward_classification(batch.images, batch.targets)
    }
}
