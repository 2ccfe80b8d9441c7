//! Softmax and normalizations.

use burn_dtensor::dtensor::ops::{activation, linalg, module};

use super::{F1, F2, F3};
use crate::golden::ops::call::{Row, op};

pub fn rows() -> Vec<Row> {
    vec![
        ("softmax_d0", op(|x: F2| activation::softmax(x, 0))),
        ("softmax_d1", op(|x: F2| activation::softmax(x, 1))),
        ("softmax_3d", op(|x: F3| activation::softmax(x, 2))),
        ("log_softmax_d1", op(|x: F2| activation::log_softmax(x, 1))),
        (
            "layer_norm",
            op(|x: F2, gamma: F1, beta: F1| module::layer_norm(x, gamma, Some(beta), 1e-5)),
        ),
        (
            "layer_norm_3d",
            op(|x: F3, gamma: F1, beta: F1| module::layer_norm(x, gamma, Some(beta), 1e-5)),
        ),
        (
            "rms_norm",
            op(|x: F2, gamma: F1| module::rms_norm(x, gamma, 1e-5)),
        ),
        (
            "rms_norm_composed",
            op(|x: F2, gamma: F1| {
                let scale = (x.clone().square().mean_dim(1) + 1e-5).sqrt().recip();
                x * scale * gamma.unsqueeze()
            }),
        ),
        (
            "group_norm",
            op(|x: F3| module::group_norm(x, None, 2, 1e-5)),
        ),
        (
            "batch_norm_train",
            op(|x: F2| {
                let (var, mean) = x.clone().var_mean_bias(0);
                (x - mean) / (var + 1e-5).sqrt()
            }),
        ),
        (
            "l2_normalize",
            op(|x: F2| x.clone() / linalg::l2_norm(x, 1).clamp_min(1e-12)),
        ),
    ]
}
