//! Reductions. Burn's keep the dimension, with length 1.

use burn_dtensor::dtensor::ops::loss::{self, Reduction};
use burn_dtensor::dtensor::ops::{activation, linalg};

use super::{F1, F2, F3};
use crate::golden::ops::call::{Row, op};

pub fn rows() -> Vec<Row> {
    vec![
        ("sum_all", op(|x: F2| x.sum())),
        ("sum_d0", op(|x: F2| x.sum_dim(0).squeeze_dim::<1>(0))),
        ("sum_d1k", op(|x: F2| x.sum_dim(1))),
        (
            "sum_d02",
            op(|x: F3| x.sum_dims(&[0, 2]).squeeze_dims::<1>(&[0, 2])),
        ),
        ("mean_all", op(|x: F2| x.mean())),
        ("mean_d0", op(|x: F2| x.mean_dim(0).squeeze_dim::<1>(0))),
        ("mean_d1k", op(|x: F2| x.mean_dim(1))),
        (
            "mean_d02",
            op(|x: F3| x.mean_dims(&[0, 2]).squeeze_dims::<1>(&[0, 2])),
        ),
        ("prod_all", op(|x: F2| x.prod())),
        ("prod_d1", op(|x: F2| x.prod_dim(1).squeeze_dim::<1>(1))),
        ("dot", op(|a: F1, b: F1| a.dot(b))),
        // Extrema.
        ("amax_all", op(|x: F2| x.max())),
        ("amax_d1", op(|x: F2| x.max_dim(1).squeeze_dim::<1>(1))),
        ("amin_all", op(|x: F2| x.min())),
        ("amin_d1", op(|x: F2| x.min_dim(1).squeeze_dim::<1>(1))),
        ("max_all", op(|x: F2| x.max())),
        ("min_all", op(|x: F2| x.min())),
        (
            "max_dim0",
            op(|x: F2| {
                let (values, indices) = x.max_dim_with_indices(0);
                (values.squeeze_dim::<1>(0), indices.squeeze_dim::<1>(0))
            }),
        ),
        ("min_dim1k", op(|x: F2| x.min_dim_with_indices(1))),
        ("argmax_d1", op(|x: F2| x.argmax(1).squeeze_dim::<1>(1))),
        ("argmax_d0k", op(|x: F2| x.argmax(0))),
        ("argmin_all", op(|x: F2| x.flatten::<1>(0, 1).argmin(0))),
        // Spread.
        ("var_d1", op(|x: F2| x.var(1).squeeze_dim::<1>(1))),
        ("var_d0k_uncorr", op(|x: F2| x.var_bias(0))),
        (
            "var_mean_d1",
            op(|x: F2| {
                let (var, mean) = x.var_mean(1);
                (var.squeeze_dim::<1>(1), mean.squeeze_dim::<1>(1))
            }),
        ),
        (
            "std_all",
            op(|x: F2| {
                let degrees = (x.shape().num_elements() - 1) as f64;
                let mean = x.clone().mean().unsqueeze();
                ((x - mean).square().sum() / degrees).sqrt()
            }),
        ),
        // Norms.
        (
            "vector_norm2",
            op(|x: F2| linalg::l2_norm_dims(x, &[0, 1]).squeeze_dim::<1>(0)),
        ),
        (
            "vector_norm1_d1",
            op(|x: F2| linalg::l1_norm(x, 1).squeeze_dim::<1>(1)),
        ),
        (
            "vector_norm_inf",
            op(|x: F2| linalg::max_abs_norm_dims(x, &[0, 1]).squeeze_dim::<1>(0)),
        ),
        ("norm_d0k", op(|x: F2| linalg::l2_norm(x, 0))),
        (
            "logsumexp_d0",
            op(|x: F2| log_sum_exp(x, 0).squeeze_dim::<1>(0)),
        ),
        (
            "logsumexp_d1",
            op(|x: F2| log_sum_exp(x, 1).squeeze_dim::<1>(1)),
        ),
        // Of pairs.
        (
            "mse_loss",
            op(|x: F2, y: F2| loss::mse_loss(x, y, Reduction::Mean)),
        ),
        (
            "bce_logits",
            op(|x: F2, y: F2| {
                loss::binary_cross_entropy_with_logits(x, activation::sigmoid(y), Reduction::Mean)
            }),
        ),
        (
            "cosine_similarity",
            op(|x: F2, y: F2| {
                let norms = linalg::l2_norm(x.clone(), 1).clamp_min(1e-8)
                    * linalg::l2_norm(y.clone(), 1).clamp_min(1e-8);
                ((x * y).sum_dim(1) / norms).squeeze_dim::<1>(1)
            }),
        ),
    ]
}

fn log_sum_exp(x: F2, dim: usize) -> F2 {
    let largest = x.clone().max_dim(dim).detach();
    (x - largest.clone()).exp().sum_dim(dim).log() + largest
}
