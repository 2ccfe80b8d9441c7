//! Losses.

use super::{Operator, operator, step};

/// Losses by their definitions.
pub mod plain {
    use burn::tensor::{Int, Tensor, activation};

    pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>, smoothing: f32) -> Tensor<1> {
        nll(activation::log_softmax(logits, 1), targets, smoothing)
    }

    pub fn nll_loss(log_probs: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        nll(log_probs, targets, 0.0)
    }

    fn nll(log_probs: Tensor<2>, targets: Tensor<1, Int>, smoothing: f32) -> Tensor<1> {
        let [samples, classes] = log_probs.dims();
        let smoothing = f64::from(smoothing);
        let picked = log_probs
            .clone()
            .gather(1, targets.reshape([samples, 1]))
            .sum()
            * (1.0 - smoothing);
        (picked + log_probs.sum() * (smoothing / classes as f64)) / -(samples as f64)
    }

    pub fn mse_loss(x: Tensor<2>, target: Tensor<2>) -> Tensor<1> {
        (x - target).square().mean()
    }

    pub fn binary_cross_entropy(x: Tensor<2>, target: Tensor<2>) -> Tensor<1> {
        ((-x.clone()).exp().log1p() + x * (-target + 1.0)).sum()
    }
}

/// Losses of DTensors.
pub mod sharded {
    use burn::tensor::{Device, Int};
    use burn_dtensor::dtensor::DTensor;
    use burn_dtensor::dtensor::ops::loss::{self, CrossEntropyLossConfig, Reduction};

    pub use burn_dtensor::dtensor::ops::loss::nll_loss;

    pub fn cross_entropy(
        logits: DTensor<2>,
        targets: DTensor<1, Int>,
        smoothing: f32,
    ) -> DTensor<1> {
        CrossEntropyLossConfig::new()
            .with_smoothing(smoothing)
            .init(&Device::flex())
            .forward(logits, targets)
    }

    pub fn mse_loss(x: DTensor<2>, target: DTensor<2>) -> DTensor<1> {
        loss::mse_loss(x, target, Reduction::Mean)
    }

    pub fn binary_cross_entropy(x: DTensor<2>, target: DTensor<2>) -> DTensor<1> {
        loss::binary_cross_entropy_with_logits(x, target, Reduction::Sum)
    }
}

pub fn operators() -> Vec<Operator> {
    vec![
        operator!("cross_entropy", |d| {
            let logits = d.any::<2>();
            let [samples, classes] = d.shape::<2>(logits);
            let (targets, smoothing) = (d.ints([samples], classes), d.one_of(&[0.0, 0.25]));
            step!((logits: Float<2>, targets: Int<1>) [smoothing] => cross_entropy(logits, targets, smoothing))
        }),
        operator!("ctc_loss", |d| {
            let count = 1 + d.below(5);
            let (x, targets, lengths) = (
                d.floats_within([4, count, 4], -2.0..-0.1),
                d.ints([count, 2], 3),
                d.ints([count], 2),
            );
            step!((x: Float<3>, targets: Int<2>, lengths: Int<1>) [] => module::ctc_loss(
                x, targets + 1, lengths.ones_like() * 4, lengths + 1, 0))
        }),
        operator!("nll_loss", |d| {
            let x = d.any::<2>();
            let [samples, classes] = d.shape::<2>(x);
            let targets = d.ints([samples], classes);
            step!((x: Float<2>, targets: Int<1>) [] => nll_loss(x, targets))
        }),
        operator!("cross_entropy_with_logits", |d| {
            let x = d.any::<2>();
            let p = d.floats(d.shape::<2>(x));
            step!((x: Float<2>, p: Float<2>) [] => loss::cross_entropy_with_logits(x, p))
        }),
        operator!("ctc_loss", |d| {
            let (time, batch, classes) = (3 + d.below(3), d.len(), 2 + d.below(2));
            let x = d.floats([time, batch, classes]);
            let (t, n, m) = (
                d.ints([batch, 1], classes - 1),
                d.ints([batch], 2),
                d.ints([batch], 2),
            );
            step!((x: Float<3>, t: Int<2>, n: Int<1>, m: Int<1>) [time] => {
                module::ctc_loss(x, t + 1, n.neg() + time as i64, m, 0)
            })
        }),
        operator!("mse_loss", |d| {
            let x = d.any::<2>();
            let target = d.floats(d.shape::<2>(x));
            step!((x: Float<2>, target: Float<2>) [] => mse_loss(x, target))
        }),
        operator!("binary_cross_entropy_with_logits", |d| {
            let x = d.any::<2>();
            let target = d.floats_within(d.shape::<2>(x), 0.0..1.0);
            step!((x: Float<2>, target: Float<2>) [] => binary_cross_entropy(x, target))
        }),
    ]
}
