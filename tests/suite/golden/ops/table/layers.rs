//! Attention, convolutions, pooling, and an inverse.

use burn::tensor::Tensor;
use burn::tensor::ops::{AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::{activation, module};
use burn_dtensor::placement::Placement::Replicate;

use super::{F1, F2, F4};
use crate::golden::ops::call::{Row, op};

pub fn rows() -> Vec<Row> {
    vec![
        (
            "attention_composed",
            op(|q: F4, k: F4, v: F4| {
                let width = q.dims()[3] as f64;
                activation::softmax(q.matmul(k.transpose()) / width.sqrt(), 3).matmul(v)
            }),
        ),
        (
            "conv2d",
            op(|x: F4, weight: F4, bias: F1| {
                module::conv2d(
                    x,
                    weight,
                    Some(bias),
                    ConvOptions::new([1, 1], [1, 1], [1, 1], 1),
                )
            }),
        ),
        (
            "avg_pool2d",
            op(|x: F4| module::avg_pool2d(x, AvgPoolOptions::new([2, 2]).with_stride([2, 2]))),
        ),
        (
            "max_pool2d",
            op(|x: F4| module::max_pool2d(x, MaxPoolOptions::new([2, 2]).with_stride([2, 2]))),
        ),
        ("dropout_p0", op(|x: F2| module::dropout(x, 0.0, 7))),
        // Held to itself without sharding: torch's random values are its own.
        ("dropout_skipvalues", op(|x: F2| module::dropout(x, 0.5, 7))),
        ("dropout_eval", op(|x: F2| x)),
        // Of `x x^T + 1`, which is positive: elimination needs no pivots.
        (
            "inverse",
            op(|x: F2| {
                let ([n, _], device) = (x.dims(), x.mesh().device().clone().autodiff());
                let replicate = vec![Replicate; x.mesh().ndim()];
                let one =
                    DTensor::distribute_replicated(Tensor::eye(n, &device), x.mesh(), &replicate)
                        .expect("a layout");
                let matrix = x.clone().matmul(x.transpose()) + one.clone();
                let mut rows = DTensor::cat(vec![matrix, one.clone()], 1);
                for k in 0..n {
                    let row = rows.clone().narrow(0, k, 1);
                    let row = row.clone() / row.narrow(1, k, 1);
                    let column = rows.clone().narrow(1, k, 1) - one.clone().narrow(1, k, 1);
                    rows = rows - column * row;
                }
                rows.narrow(1, n, n)
            }),
        ),
    ]
}
