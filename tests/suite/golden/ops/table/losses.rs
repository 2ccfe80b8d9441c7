//! Losses of classes.

use burn_dtensor::dtensor::ops::activation;
use burn_dtensor::dtensor::ops::loss::{self, CrossEntropyLossConfig, Reduction};

use super::{F2, I1};
use crate::golden::ops::call::{Row, op};

pub fn rows() -> Vec<Row> {
    vec![
        (
            "cross_entropy",
            op(|x: F2, classes: I1| loss::cross_entropy(x, classes)),
        ),
        (
            "cross_entropy_sum",
            op(|x: F2, classes: I1| {
                let config = CrossEntropyLossConfig::new().with_reduction(Reduction::Sum);
                config.init(x.mesh().device()).forward(x, classes)
            }),
        ),
        (
            "cross_entropy_none",
            op(|x: F2, classes: I1| {
                CrossEntropyLossConfig::new()
                    .init(x.mesh().device())
                    .forward_no_reduction(x, classes)
            }),
        ),
        (
            "cross_entropy_ignore",
            op(|x: F2, classes: I1| {
                CrossEntropyLossConfig::new()
                    .with_ignore_index(1)
                    .init(x.mesh().device())
                    .forward(x, classes)
            }),
        ),
        (
            "nll_loss",
            op(|x: F2, classes: I1| loss::nll_loss(activation::log_softmax(x, 1), classes)),
        ),
    ]
}
