//! Batch normalization, with given statistics or with those of the batch.
//!
//! The statistics of a batch are means over all of it, however it is cut: a mesh dimension that
//! cuts the batch adds up its ranks' terms, a few numbers per channel. This is what other frameworks
//! call synchronized batch normalization, and without it a sharded batch would not give what the
//! whole one gives.
//!
//! ```text
//!             rank 0 (4 rows)    rank 1 (3 rows)    all
//! mean        4/7 its mean       3/7 its mean       all-reduce: the mean of 7 rows
//! variance    4/7 its mean of    3/7 its mean of    all-reduce: the variance of 7 rows
//!             (x - mean)^2       (x - mean)^2
//! ```
//!
//! The variance has an all-reduce of its own: without the mean of the whole batch it would be a small
//! difference of large numbers. Backward sends as much again.

use burn::tensor::{DType, Shape, Tensor, module};

use super::args::operand_error;
use super::norm::per_channel;
use super::{EinsumRule, Operand, Operator, apply};
use crate::dtensor::DTensor;
use crate::dtensor::local::{in_single, reshape};
use crate::error::OrUnwind;

const BATCH_NORM: EinsumRule = EinsumRule::new("batch_norm", "bc.., c, c, c, c -> bc..");
const MEAN: EinsumRule = EinsumRule::new("batch_norm_train", "bc.. -> c");
const VARIANCE: EinsumRule = EinsumRule::new("batch_norm_train", "bc.., c -> c");

/// Batch normalization with given statistics, as burn's
/// [`batch_norm`](burn::tensor::module::batch_norm):
/// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, per channel.
///
/// Of half precision all is computed in single precision, and the output is of the input's type again.
///
/// # Shapes
/// - input and output: `[batch, channels, ..]`
/// - gamma, beta, mean, variance: `[channels]`
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for others.
#[must_use]
#[track_caller]
pub fn batch_norm<const D: usize>(
    input: impl Into<Operand<D>>,
    gamma: DTensor<1>,
    beta: DTensor<1>,
    mean: DTensor<1>,
    variance: DTensor<1>,
    epsilon: f64,
) -> DTensor<D> {
    apply(&BATCH_NORM, (input.into(), gamma, beta, mean, variance), |(x, gamma, beta, mean, variance), _| {
        let dtype = x.dtype();
        if !is_half(dtype) {
            return module::batch_norm(x, gamma, beta, mean, variance, epsilon);
        }
        let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(in_single);
        module::batch_norm(in_single(x), gamma, beta, mean, variance, epsilon).cast(dtype)
    })
}

/// What [`batch_norm_train`] gives.
#[derive(Debug, Clone)]
pub struct BatchNormTrainOutput<const D: usize> {
    /// The normalized input: `[batch, channels, ..]`.
    pub output: DTensor<D>,
    /// The mean of the whole batch, detached: `[channels]`, not partial.
    pub mean: DTensor<1>,
    /// The variance of the whole batch without Bessel's correction, detached: `[channels]`, not
    /// partial.
    pub variance: DTensor<1>,
}

/// Batch normalization with the statistics of the whole batch, as burn's
/// [`batch_norm_train`](burn::tensor::module::batch_norm_train).
///
/// Of half precision all is computed in single precision, of which the statistics stay.
///
/// # Shapes
/// - input and output: `[batch, channels, ..]`
/// - gamma, beta: `[channels]`
///
/// # Collective
/// If the batch is cut, in forward and in backward: every rank of the mesh, two all-reduces each of a
/// number per channel.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for others.
#[must_use]
#[track_caller]
pub fn batch_norm_train<const D: usize>(
    input: impl Into<Operand<D>>,
    gamma: DTensor<1>,
    beta: DTensor<1>,
    epsilon: f64,
) -> BatchNormTrainOutput<D> {
    let input = input.into().placed().or_unwind();
    let shapes = [input.shape(), gamma.shape(), beta.shape()];
    if D < 2 || shapes[1..].iter().any(|vector| vector[0] != shapes[0][1]) {
        let why = "gamma and beta need one element per channel, dimension 1 of the input";
        operand_error("batch_norm_train", &shapes, why).unwind();
    }
    let mean = replicated(apply(&MEAN, input.clone(), |x, op| term_of_mean(in_single(x), op)));
    let variance = replicated(apply(&VARIANCE, (input.clone(), mean.clone()), |(x, mean), op| {
        term_of_mean((in_single(x) - per_channel(mean)).square(), op)
    }));
    BatchNormTrainOutput {
        output: batch_norm(input, gamma, beta, mean.clone(), variance.clone(), epsilon),
        mean: mean.detach(),
        variance: variance.detach(),
    }
}

/// This rank's term of the mean of each channel: the mean of its own elements times its share of all.
fn term_of_mean<const D: usize>(x: Tensor<D>, op: &Operator) -> Tensor<1> {
    let (local, global) = (x.shape(), op.input_spec(0).shape());
    let others: Vec<usize> = (0..D).filter(|&dim| dim != 1).collect();
    let share: f64 = others.iter().map(|&dim| local[dim] as f64 / global[dim] as f64).product();
    reshape(x.mean_dims(&others).mul_scalar(share), Shape::from([local[1]]))
}

/// `statistics` of the whole batch, not this rank's terms of them.
fn replicated<const D: usize>(statistics: DTensor<D>) -> DTensor<D> {
    let spec = statistics.reduced_spec();
    statistics.redistribute_to(spec.layout()).or_unwind()
}

/// Squares of half precision overflow or vanish.
fn is_half(dtype: DType) -> bool {
    dtype.size() < 4
}
