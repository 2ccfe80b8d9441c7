//! Batch normalization, with given statistics or with those of the batch.
//!
//! The statistics are means over the full batch, however it is sharded: on a mesh dimension that
//! shards the batch, the ranks sum their contributions, a few numbers per channel. Other frameworks
//! call this synchronized batch normalization. Without it, a sharded batch would give other results
//! than an unsharded one.
//!
//! ```text
//!             rank 0 (4 rows)    rank 1 (3 rows)    all
//! mean        4/7 its mean       3/7 its mean       all-reduce: the mean of 7 rows
//! variance    4/7 its mean of    3/7 its mean of    all-reduce: the variance of 7 rows
//!             (x - mean)^2       (x - mean)^2
//! ```
//!
//! The variance needs its own all-reduce: computed without the mean of the full batch, it would be
//! a small difference of large numbers. Backward sends the same amount.

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

/// Normalizes a batch with given statistics, as burn's [`batch_norm`](burn::tensor::module::batch_norm): `(x -
/// mean) / sqrt(variance + epsilon) * gamma + beta`, per channel.
///
/// Half precision inputs are computed in single precision; the output has the input's element type.
///
/// # Shapes
/// - input and output: `[batch, channels, ..]`
/// - gamma, beta, mean, variance: `[channels]`
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for other
/// shapes.
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
    apply(
        &BATCH_NORM,
        (input.into(), gamma, beta, mean, variance),
        |(x, gamma, beta, mean, variance), _| {
            let dtype = x.dtype();
            if !is_half(dtype) {
                return module::batch_norm(x, gamma, beta, mean, variance, epsilon);
            }
            let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(in_single);
            module::batch_norm(in_single(x), gamma, beta, mean, variance, epsilon).cast(dtype)
        },
    )
}

/// Output and statistics of [`batch_norm_train`].
#[derive(Debug, Clone)]
pub struct BatchNormTrainOutput<const D: usize> {
    /// The normalized input: `[batch, channels, ..]`.
    pub output: DTensor<D>,
    /// The mean of the full batch, detached: `[channels]`, not partial.
    pub mean: DTensor<1>,
    /// The variance of the full batch without Bessel's correction, detached: `[channels]`, not
    /// partial.
    pub variance: DTensor<1>,
}

/// Normalizes a batch with the statistics of the full batch, as burn's
/// [`batch_norm_train`](burn::tensor::module::batch_norm_train).
///
/// Half precision inputs are computed in single precision, and the statistics remain in single
/// precision.
///
/// # Shapes
/// - input and output: `[batch, channels, ..]`
/// - gamma, beta: `[channels]`
///
/// # Collective
/// If the batch is sharded: every rank of the mesh, two all-reduces of one number per channel in
/// forward and two in backward.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for other
/// shapes, and with [`MeshMismatch`](crate::dtensor::DTensorError::MeshMismatch) for inputs on
/// different meshes.
#[must_use]
#[track_caller]
pub fn batch_norm_train<const D: usize>(
    input: impl Into<Operand<D>>,
    gamma: DTensor<1>,
    beta: DTensor<1>,
    epsilon: f64,
) -> BatchNormTrainOutput<D> {
    let input: Operand<D> = input.into();
    // The constraint of the input has one placement for each dimension of the mesh that the others
    // are on.
    [&gamma, &beta]
        .into_iter()
        .try_for_each(|vector| input.tensor.spec().check_same_mesh(vector.spec()))
        .or_unwind();
    let input = input.placed().or_unwind();
    let shapes = [input.shape(), gamma.shape(), beta.shape()];
    if D < 2 || shapes[1..].iter().any(|vector| vector[0] != shapes[0][1]) {
        let why = "gamma and beta need one element per channel, dimension 1 of the input";
        operand_error("batch_norm_train", &shapes, why).unwind();
    }
    let mean = replicated(apply(&MEAN, input.clone(), |x, op| {
        term_of_mean(in_single(x), op)
    }));
    let variance = replicated(apply(
        &VARIANCE,
        (input.clone(), mean.clone()),
        |(x, mean), op| term_of_mean((in_single(x) - per_channel(mean)).square(), op),
    ));
    BatchNormTrainOutput {
        output: batch_norm(input, gamma, beta, mean.clone(), variance.clone(), epsilon),
        mean: mean.detach(),
        variance: variance.detach(),
    }
}

/// Returns this rank's contribution to the mean of each channel: the mean of its elements, times
/// its share of all elements.
fn term_of_mean<const D: usize>(x: Tensor<D>, op: &Operator) -> Tensor<1> {
    let local = x.shape();
    let global = op.input_spec(0).shape();
    let others: Vec<usize> = (0..D).filter(|&dim| dim != 1).collect();
    let share: f64 = others
        .iter()
        .map(|&dim| local[dim] as f64 / global[dim] as f64)
        .product();
    reshape(
        x.mean_dims(&others).mul_scalar(share),
        Shape::from([local[1]]),
    )
}

/// Reduces partial `statistics` over the ranks.
fn replicated<const D: usize>(statistics: DTensor<D>) -> DTensor<D> {
    let spec = statistics.reduced_spec();
    statistics.redistribute_to(spec.layout()).or_unwind()
}

/// Returns true for half precision types, in which squares overflow or vanish.
fn is_half(dtype: DType) -> bool {
    dtype.size() < 4
}
