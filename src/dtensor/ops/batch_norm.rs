//! Batch normalization, with given statistics or with those of the batch.
//!
//! | | input | channels' vectors | |
//! |---|---|---|---|
//! | `batch_norm` | `S(channels)` | `S(channels)` | `S(channels)` |
//! | `batch_norm` | `S(d)`, any other | `R` | `S(d)` |
//!
//! The statistics of a batch are means over all of it, however it is cut: a mesh dimension that
//! cuts the batch adds up its ranks' terms, a few numbers a channel. This is what other frameworks
//! call synchronized batch normalization, and without it a sharded batch would not give what the
//! whole one gives.

use burn::tensor::{Shape, module};

use super::args::misfit;
use super::placements::{R, S};
use super::{Rule, Strategy, resolve, strategy};
use crate::Result;
use crate::dtensor::DTensor;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct BatchNorm;

impl Rule for BatchNorm {
    fn name(&self) -> &'static str {
        "batch_norm"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let x = &inputs[0];
        if x.num_dims() < 2 || inputs[1..].iter().any(|vector| vector[0] != x[1]) {
            return Err(misfit(self.name(), inputs, "vectors need one element a channel, dimension 1 of the input"));
        }
        Ok(vec![x.clone()])
    }

    fn strategies(&self, inputs: &[Shape], _outputs: &[Shape]) -> Vec<Strategy> {
        let row = |dim| {
            let vector = if dim == 1 { S(0) } else { R };
            strategy([S(dim), vector, vector, vector, vector], [S(dim)])
        };
        (0..inputs[0].num_dims()).map(row).collect()
    }
}

/// Batch normalization with given statistics, as burn's
/// [`batch_norm`](burn::tensor::module::batch_norm):
/// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, a channel.
///
/// # Shapes
/// - input and output: `[batch, channels, ..]`
/// - gamma, beta, mean, variance: `[channels]`
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for others.
#[must_use]
pub fn batch_norm<const D: usize>(
    input: DTensor<D>,
    gamma: DTensor<1>,
    beta: DTensor<1>,
    mean: DTensor<1>,
    variance: DTensor<1>,
    epsilon: f64,
) -> DTensor<D> {
    let specs = [input.spec(), gamma.spec(), beta.spec(), mean.spec(), variance.spec()];
    let op = resolve(&BatchNorm, &specs).unwrap_or_else(|error| error.unwind());
    let x = input.enter(&op, 0);
    let (gamma, beta) = (gamma.enter(&op, 1), beta.enter(&op, 2));
    let (mean, variance) = (mean.enter(&op, 3), variance.enter(&op, 4));
    op.leave(0, module::batch_norm(x, gamma, beta, mean, variance, epsilon))
}

/// What [`batch_norm_train`] gives.
#[derive(Debug, Clone)]
pub struct BatchNormTrainOutput<const D: usize> {
    /// The normalized input: `[batch, channels, ..]`.
    pub output: DTensor<D>,
    /// The mean of the whole batch, detached: `[channels]`, no pending reduction.
    pub mean: DTensor<1>,
    /// The variance of the whole batch without Bessel's correction, detached: `[channels]`, no
    /// pending reduction.
    pub variance: DTensor<1>,
}

/// Batch normalization with the statistics of the whole batch, as burn's
/// [`batch_norm_train`](burn::tensor::module::batch_norm_train).
///
/// # Shapes
/// - input and output: `[batch, channels, ..]`
/// - gamma, beta: `[channels]`
///
/// # Collective
/// If the batch is cut, in forward and in backward: every rank of the mesh.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for others.
#[must_use]
pub fn batch_norm_train<const D: usize>(
    input: DTensor<D>,
    gamma: DTensor<1>,
    beta: DTensor<1>,
    epsilon: f64,
) -> BatchNormTrainOutput<D> {
    let shapes = [input.shape(), gamma.shape(), beta.shape()];
    if D < 2 || shapes[1..].iter().any(|vector| vector[0] != shapes[0][1]) {
        let why = "gamma and beta need one element a channel, dimension 1 of the input";
        misfit("batch_norm_train", &shapes, why).unwind();
    }
    let channels = shapes[0][1];
    let others: Vec<usize> = (0..D).filter(|&dim| dim != 1).collect();
    let mut a_channel = [1; D];
    a_channel[1] = channels;
    let mean = whole(input.clone().mean_dims(&others));
    let centered = input - mean.clone();
    let variance = whole(centered.clone().square().mean_dims(&others));
    let normalized = centered / (variance.clone() + epsilon).sqrt();
    BatchNormTrainOutput {
        output: normalized * gamma.reshape(a_channel) + beta.reshape(a_channel),
        mean: mean.detach().reshape([channels]),
        variance: variance.detach().reshape([channels]),
    }
}

/// `statistics` of the whole batch, not this rank's terms of them.
fn whole<const D: usize>(statistics: DTensor<D>) -> DTensor<D> {
    let spec = statistics.reduced_spec();
    statistics.redistribute_to(spec.layout()).unwrap_or_else(|error| error.unwind())
}
