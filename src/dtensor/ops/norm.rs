//! Normalizations: what is normalized together is whole, the rest may be cut.
//!
//! | | input | scale and shift | |
//! |---|---|---|---|
//! | `layer_norm`, `rms_norm` | `S(d)`, any but the last | `R` | `S(d)` |
//! | `group_norm` | `S(batch)` | `R` | `S(batch)` |
//! | `group_norm` | `S(channels)`, in whole groups | `S(channels)` | `S(channels)` |
//!
//! `R` scales that meet a cut input get the sum of the ranks' gradients in backward.

use burn::tensor::{DType, FloatDType, Shape, Tensor, module};

use super::args::misfit;
use super::placements::{R, S};
use super::{Resolved, Rule, Strategy, binary, strategy, ternary, unary};
use crate::Result;
use crate::dtensor::DTensor;
use crate::dtensor::local::reshape;

/// The last dimension is normalized, and scaled by vectors of its length.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct LastDim(&'static str);

impl Rule for LastDim {
    fn name(&self) -> &'static str {
        self.0
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let x = &inputs[0];
        let len = x[x.num_dims() - 1];
        if inputs[1..].iter().any(|scale| scale[0] != len) {
            let why = format!("the last dimension has {len} elements, and so must scale and shift");
            return Err(misfit(self.name(), inputs, why));
        }
        Ok(vec![x.clone()])
    }

    fn strategies(&self, inputs: &[Shape], _outputs: &[Shape]) -> Vec<Strategy> {
        let scales = std::iter::repeat_n(R, inputs.len() - 1);
        let row = |dim| strategy(std::iter::once(S(dim)).chain(scales.clone()), [S(dim)]);
        (0..inputs[0].num_dims() - 1).map(row).collect()
    }
}

/// Layer normalization over the last dimension, as burn's
/// [`layer_norm`](burn::tensor::module::layer_norm): `(x - mean) / sqrt(var + epsilon) * gamma + beta`.
///
/// # Shapes
/// - input and output: `[.., d_model]`
/// - gamma, beta: `[d_model]`
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for others.
#[must_use]
pub fn layer_norm<const D: usize>(
    input: DTensor<D>,
    gamma: DTensor<1>,
    beta: Option<DTensor<1>>,
    epsilon: f64,
) -> DTensor<D> {
    layer_norm_by(input, gamma, beta, |x, gamma, beta| module::layer_norm(x, gamma, beta, epsilon))
}

/// [`layer_norm`], computed by `local` on this rank's part.
pub(crate) fn layer_norm_by<const D: usize>(
    input: DTensor<D>,
    gamma: DTensor<1>,
    beta: Option<DTensor<1>>,
    local: impl FnOnce(Tensor<D>, Tensor<1>, Option<Tensor<1>>) -> Tensor<D>,
) -> DTensor<D> {
    let rule = LastDim("layer_norm");
    match beta {
        Some(beta) => ternary(&rule, input, gamma, beta, |x, gamma, beta, _| local(x, gamma, Some(beta))),
        None => binary(&rule, input, gamma, |x, gamma, _| local(x, gamma, None)),
    }
}

/// Root mean square normalization over the last dimension, as burn's
/// [`RmsNorm`](burn::nn::RmsNorm): `x / sqrt(mean(x^2) + epsilon) * gamma`, the mean in single
/// precision.
///
/// # Shapes
/// - input and output: `[.., d_model]`
/// - gamma: `[d_model]`
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for others.
#[must_use]
pub fn rms_norm<const D: usize>(input: DTensor<D>, gamma: DTensor<1>, epsilon: f64) -> DTensor<D> {
    binary(&LastDim("rms_norm"), input, gamma, |x, gamma, _| {
        let dtype = x.dtype();
        let rms = x.clone().cast(FloatDType::F32).square().mean_dim(D - 1).add_scalar(epsilon).sqrt();
        (x / rms.cast(dtype)) * gamma.unsqueeze()
    })
}

/// Channels (dimension 1) are normalized in groups of equal size, together with all dimensions
/// after them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Groups(usize);

impl Rule for Groups {
    fn name(&self) -> &'static str {
        "group_norm"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let (x, groups) = (&inputs[0], self.0);
        let refuse = |why| Err(misfit(self.name(), inputs, why));
        if x.num_dims() < 2 || groups == 0 || x[1] % groups != 0 {
            return refuse(format!("the channels, dimension 1, must make {groups} groups of equal size"));
        }
        if inputs[1..].iter().any(|scale| scale[0] != x[1]) {
            return refuse(format!("there are {} channels, and so must scale and shift have", x[1]));
        }
        Ok(vec![x.clone()])
    }

    fn strategies(&self, inputs: &[Shape], _outputs: &[Shape]) -> Vec<Strategy> {
        let row = |x, scale| strategy(std::iter::once(x).chain(inputs[1..].iter().map(|_| scale)), [x]);
        vec![row(S(0), R), row(S(1), S(0)).if_divides(self.0)]
    }
}

/// Group normalization, as burn's [`GroupNorm`](burn::nn::GroupNorm): channels in `num_groups`
/// groups, each normalized over its channels and all dimensions after them, then
/// `* gamma + beta` a channel.
///
/// # Shapes
/// - input and output: `[batch, channels, ..]`
/// - gamma, beta: `[channels]`
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) for others.
#[must_use]
pub fn group_norm<const D: usize>(
    input: DTensor<D>,
    gamma_beta: Option<(DTensor<1>, DTensor<1>)>,
    num_groups: usize,
    epsilon: f64,
) -> DTensor<D> {
    let rule = Groups(num_groups);
    let groups_of = |op: &Resolved| num_groups * op.output_shape(0)[1] / op.input(0).shape()[1].max(1);
    match gamma_beta {
        Some((gamma, beta)) => ternary(&rule, input, gamma, beta, |x, gamma, beta, op| {
            let [gamma, beta] = [gamma, beta].map(a_channel);
            normalized_groups(x, groups_of(op), epsilon) * gamma + beta
        }),
        None => unary(&rule, input, |x, op| normalized_groups(x, groups_of(op), epsilon)),
    }
}

fn normalized_groups<const D: usize>(x: Tensor<D>, groups: usize, epsilon: f64) -> Tensor<D> {
    let shape = x.shape();
    let dtype = x.dtype();
    let rows: Tensor<2> = reshape(x, Shape::from([shape[0] * groups, shape[1..].iter().product::<usize>() / groups]));
    // Half precision cannot hold a sum of squares.
    let rows = if dtype == DType::F16 { rows.cast(FloatDType::F32) } else { rows };
    let rows = rows.clone() - rows.mean_dim(1);
    let deviation = rows.clone().square().mean_dim(1).add_scalar(epsilon).sqrt();
    reshape((rows / deviation).cast(dtype), shape)
}

/// `[channels]` as `[1, channels, 1, ..]`.
fn a_channel<const D: usize>(vector: Tensor<1>) -> Tensor<D> {
    let mut shape = [1; D];
    shape[1] = vector.dims()[0];
    reshape(vector, Shape::from(shape))
}
