//! Normalizations. Dimensions that are normalized together are not sharded; the others may be.
//!
//! | | input | scale and shift | |
//! |---|---|---|---|
//! | `group_norm` | `S(batch)` | `R` | `S(batch)` |
//! | `group_norm` | `S(channels)`, in complete groups | `S(channels)` | `S(channels)` |
//!
//! The gradients of `R` scales are summed over the ranks in backward if the input is sharded.

use burn::tensor::{DType, FloatDType, Shape, Tensor, module};

use super::args::operand_error;
use super::placements::{R, S};
use super::{EinsumRule, Operand, ShardingRule, Strategy, apply, strategy};
use crate::Result;
use crate::dtensor::DTensor;
use crate::dtensor::local::reshape;

const LAYER_NORM: EinsumRule = EinsumRule::new("layer_norm", "..D, D* -> ..D");
const RMS_NORM: EinsumRule = EinsumRule::new("rms_norm", "..D, D -> ..D");

/// Normalizes a layer over the last dimension, as burn's
/// [`layer_norm`](burn::tensor::module::layer_norm): `(x - mean) / sqrt(var + epsilon) * gamma +
/// beta`.
///
/// # Shapes
/// - input and output: `[.., d_model]`
/// - gamma, beta: `[d_model]`
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for other
/// shapes.
#[must_use]
#[track_caller]
pub fn layer_norm<const D: usize>(
    input: impl Into<Operand<D>>,
    gamma: DTensor<1>,
    beta: Option<DTensor<1>>,
    epsilon: f64,
) -> DTensor<D> {
    layer_norm_by(input, gamma, beta, |x, gamma, beta| {
        module::layer_norm(x, gamma, beta, epsilon)
    })
}

/// Like [`layer_norm`], but computed by `local` on this rank's local tensors.
#[track_caller]
pub(crate) fn layer_norm_by<const D: usize>(
    input: impl Into<Operand<D>>,
    gamma: DTensor<1>,
    beta: Option<DTensor<1>>,
    local: impl FnOnce(Tensor<D>, Tensor<1>, Option<Tensor<1>>) -> Tensor<D>,
) -> DTensor<D> {
    apply(
        &LAYER_NORM,
        (input.into(), gamma, beta),
        |(x, gamma, beta), _| local(x, gamma, beta),
    )
}

/// Normalizes by the root mean square over the last dimension, as burn's
/// [`RmsNorm`](burn::nn::RmsNorm): `x / sqrt(mean(x^2) + epsilon) * gamma`. The mean is computed in
/// single precision.
///
/// # Shapes
/// - input and output: `[.., d_model]`
/// - gamma: `[d_model]`
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for other
/// shapes.
#[must_use]
#[track_caller]
pub fn rms_norm<const D: usize>(
    input: impl Into<Operand<D>>,
    gamma: DTensor<1>,
    epsilon: f64,
) -> DTensor<D> {
    apply(&RMS_NORM, (input.into(), gamma), |(x, gamma), _| {
        let dtype = x.dtype();
        let rms = x
            .clone()
            .cast(FloatDType::F32)
            .square()
            .mean_dim(D - 1)
            .add_scalar(epsilon)
            .sqrt();
        (x / rms.cast(dtype)) * gamma.unsqueeze()
    })
}

/// Rule for normalizing channels (dimension 1) in groups of equal size, together with all
/// dimensions after them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ChannelGroups(usize);

impl ShardingRule for ChannelGroups {
    fn name(&self) -> &'static str {
        "group_norm"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let x = &inputs[0];
        let groups = self.0;
        let refuse = |why| Err(operand_error(self.name(), inputs, why));
        if x.num_dims() < 2 || groups == 0 || !x[1].is_multiple_of(groups) {
            return refuse(format!(
                "the channels (dimension 1) must make {groups} groups of equal size"
            ));
        }
        if inputs[1..].iter().any(|scale| scale[0] != x[1]) {
            return refuse(format!(
                "scale and shift must have {} elements, one for each channel",
                x[1]
            ));
        }
        Ok(vec![x.clone()])
    }

    fn strategies(&self, inputs: &[Shape], _outputs: &[Shape]) -> Vec<Strategy> {
        let row = |x, scale| {
            strategy(
                std::iter::once(x).chain(inputs[1..].iter().map(|_| scale)),
                [x],
            )
        };
        vec![row(S(0), R), row(S(1), S(0)).if_divides(self.0)]
    }
}

/// Normalizes groups of channels, as burn's [`GroupNorm`](burn::nn::GroupNorm): each of the
/// `num_groups` groups is normalized over its channels and all dimensions after them, followed by
/// `* gamma + beta` per channel.
///
/// # Shapes
/// - input and output: `[batch, channels, ..]`
/// - gamma, beta: `[channels]`
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for other
/// shapes.
#[must_use]
#[track_caller]
pub fn group_norm<const D: usize>(
    input: impl Into<Operand<D>>,
    gamma_beta: Option<(DTensor<1>, DTensor<1>)>,
    num_groups: usize,
    epsilon: f64,
) -> DTensor<D> {
    apply(
        &ChannelGroups(num_groups),
        (input.into(), gamma_beta),
        |(x, gamma_beta), op| {
            let groups = num_groups * op.output_shape(0)[1] / op.input_spec(0).shape()[1].max(1);
            let normalized = normalized_groups(x, groups, epsilon);
            match gamma_beta {
                Some((gamma, beta)) => normalized * per_channel(gamma) + per_channel(beta),
                None => normalized,
            }
        },
    )
}

fn normalized_groups<const D: usize>(x: Tensor<D>, groups: usize, epsilon: f64) -> Tensor<D> {
    let shape = x.shape();
    let dtype = x.dtype();
    let rows: Tensor<2> = reshape(
        x,
        Shape::from([
            shape[0] * groups,
            shape[1..].iter().product::<usize>() / groups,
        ]),
    );
    // A sum of squares overflows in half precision.
    let rows = if dtype == DType::F16 {
        rows.cast(FloatDType::F32)
    } else {
        rows
    };
    let rows = rows.clone() - rows.mean_dim(1);
    let deviation = rows.clone().square().mean_dim(1).add_scalar(epsilon).sqrt();
    reshape((rows / deviation).cast(dtype), shape)
}

/// Reshapes `[channels]` to `[1, channels, 1, ..]`.
pub(super) fn per_channel<const D: usize>(vector: Tensor<1>) -> Tensor<D> {
    let mut shape = [1; D];
    shape[1] = vector.dims()[0];
    reshape(vector, Shape::from(shape))
}
