//! Activations, and what is composed of them.

use burn_dtensor::dtensor::ops::activation;

use super::F2;
use crate::golden::ops::call::{Row, op};

pub fn rows() -> Vec<Row> {
    vec![
        ("relu", op(|x: F2| activation::relu(x))),
        ("sigmoid", op(|x: F2| activation::sigmoid(x))),
        ("gelu", op(|x: F2| activation::gelu(x))),
        ("gelu_tanh", op(|x: F2| activation::gelu_approximate(x))),
        ("silu", op(|x: F2| activation::silu(x))),
        ("softplus", op(|x: F2| activation::softplus(x, 1.0))),
        ("leaky_relu", op(|x: F2| activation::leaky_relu(x, 0.1))),
        ("elu", op(|x: F2| activation::elu(x, 1.0))),
        ("hardtanh", op(|x: F2| activation::hardtanh(x, -1.0, 1.0))),
        ("logsigmoid", op(|x: F2| activation::log_sigmoid(x))),
        ("mish", op(|x: F2| activation::mish(x))),
        ("glu", op(|x: F2| activation::glu(x, 1))),
        (
            "multi_add_chain",
            op(|x: F2, y: F2| {
                (activation::relu(x + y) * 2.0)
                    .sum_dim(1)
                    .squeeze_dim::<1>(1)
            }),
        ),
        (
            "linear_gelu_linear",
            op(|x: F2, up: F2, down: F2| {
                activation::gelu(x.matmul(up.transpose())).matmul(down.transpose())
            }),
        ),
    ]
}
