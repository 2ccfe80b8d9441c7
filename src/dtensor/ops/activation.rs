//! Activation functions, with burn's names and signatures: [`burn::tensor::activation`].
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_dtensor::Error;
//! use burn_dtensor::comm::{Launch, launch};
//! use burn_dtensor::dtensor::DTensor;
//! use burn_dtensor::dtensor::ops::activation::softmax;
//! use burn_dtensor::mesh::DeviceMesh;
//! use burn_dtensor::placement::Placement::Shard;
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//!     let scores = DTensor::<2>::zeros([4, 8], &mesh, &[Shard(0)], mesh.device())?;
//!     assert_eq!(softmax(scores, -1).placements(), [Shard(0)]);
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```

use std::panic::Location;

use burn::tensor::{AsIndex, Shape, activation as local};

use super::args::{dim_of, operand_error};
use super::partial_rules::{INCREASING, INCREASING_TO, NO_PARTIAL, PartialRules};
use super::shard_summaries::ShardSummaries;
use super::{EinsumRule, Operand, apply};
use crate::dtensor::DTensor;
use crate::dtensor::local::reshape;
use crate::error::OrUnwind;

macro_rules! elementwise {
    (@rule $name:ident() $partials:expr) => { &const { EinsumRule::pointwise(stringify!($name), $partials) } };
    (@rule $name:ident($($arg:ident),+) $partials:expr) => { &EinsumRule::pointwise(stringify!($name), $partials) };
    ($($name:ident($($arg:ident),*): $partials:expr),* $(,)?) => {$(
        #[doc = concat!("Applies burn's [`", stringify!($name), "`](local::", stringify!($name), ") elementwise.")]
        #[must_use]
        #[track_caller]
        pub fn $name<const D: usize>(tensor: DTensor<D>, $($arg: f64),*) -> DTensor<D> {
            apply(elementwise!(@rule $name($($arg),*) $partials), tensor, |x, _| local::$name(x, $($arg),*))
        }
    )*};
}

/// Returns `partials` if a condition on the function's parameters holds, or else no rules.
const fn only_if(condition: bool, partials: PartialRules) -> PartialRules {
    if condition { partials } else { NO_PARTIAL }
}

elementwise! {
    relu(): INCREASING,
    relu6(): NO_PARTIAL, // it clamps
    leaky_relu(negative_slope): only_if(negative_slope > 0.0, INCREASING),
    thresholded_relu(alpha): only_if(alpha >= 0.0, INCREASING),
    threshold(threshold, value): only_if(value <= threshold, INCREASING),
    sigmoid(): INCREASING,
    log_sigmoid(): INCREASING,
    hard_sigmoid(alpha, beta): NO_PARTIAL, // it clamps
    tanh(): INCREASING,
    tanhshrink(): INCREASING,
    hardtanh(min_val, max_val): NO_PARTIAL, // it clamps
    softsign(): NO_PARTIAL,
    softplus(beta): INCREASING,
    // Not increasing: it decreases where it becomes linear, the more the lower the threshold is.
    softplus_with_threshold(beta, threshold): NO_PARTIAL,
    elu(alpha): only_if(alpha >= 0.0, INCREASING_TO),
    celu(alpha): only_if(alpha > 0.0, INCREASING_TO),
    selu(): INCREASING_TO,
    hard_shrink(lambda): only_if(lambda >= 0.0, INCREASING),
    soft_shrink(lambda): only_if(lambda >= 0.0, INCREASING),
    shrink(lambda, bias): only_if(lambda >= bias, INCREASING),
    gelu(): NO_PARTIAL,
    gelu_approximate(): NO_PARTIAL,
    silu(): NO_PARTIAL,
    hard_swish(): NO_PARTIAL,
    mish(): NO_PARTIAL,
}

/// Defines softmaxes: a function of the local tensor, and the result from `x - max`, `max` and the
/// sum of `exp(x - max)`.
macro_rules! softmaxes {
    ($($name:ident(|$x:ident| $of:expr) = (|$shifted:ident, $max:ident, $sum:ident| $value:expr));* $(;)?) => {$(
        #[doc = concat!("Applies burn's [`", stringify!($name), "`](local::", stringify!($name), ") along `dim`.")]
        ///
        /// # Collective
        /// If `dim` is sharded: every rank of the mesh. Forward gathers two elements of every shard
        /// for each index of the other dimensions; backward reduce-scatters their gradients.
        #[must_use]
        #[track_caller]
        pub fn $name<const D: usize>(tensor: DTensor<D>, dim: impl AsIndex) -> DTensor<D> {
            let (dim, at) = (dim_of(stringify!($name), dim, D), Location::caller());
            let axes = &const { EinsumRule::new(stringify!($name), "..d.. -> ..d..") };
            apply(&axes.at([dim]).with_slots(2), tensor, |$x, op| match ShardSummaries::of(op, dim, at) {
                Some(parts) => {
                    let dtype = $x.dtype();
                    let [$shifted, $max, $sum] = parts.exponentials($of).or_unwind();
                    ($value).cast(dtype)
                }
                None => local::$name($x, dim),
            })
        }
    )*};
}

softmaxes! {
    softmax(|x| x) = (|shifted, _max, sum| shifted.exp() / sum);
    log_softmax(|x| x) = (|shifted, _max, sum| shifted - sum.log());
    softmin(|x| x.neg()) = (|shifted, _max, sum| shifted.exp() / sum);
    quiet_softmax(|x| x) = (|shifted, max, sum| shifted.exp() / (sum + max.neg().exp()));
}

const GLU: EinsumRule = EinsumRule::new("glu", ".._.. -> ..D..");
const PRELU: EinsumRule = EinsumRule::new("prelu", ".., 1 -> ..");
const PRELU_PER_CHANNEL: EinsumRule = EinsumRule::new("prelu", "bc.., c -> bc..");

/// Multiplies the first half of `dim` by the sigmoid of the second, as burn's [`glu`](local::glu).
/// If `dim` is sharded, it is gathered first.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if the length of
/// `dim` is odd.
#[must_use]
#[track_caller]
pub fn glu<const D: usize>(tensor: DTensor<D>, dim: impl AsIndex) -> DTensor<D> {
    let dim = dim_of("glu", dim, D);
    let len = tensor.dims()[dim];
    if len % 2 == 1 {
        operand_error(
            "glu",
            &[tensor.shape()],
            format!("dimension {dim} must have an even length, not {len}"),
        )
        .unwind();
    }
    apply(&GLU.at([dim]).lens([len / 2]), tensor, |x, _| {
        local::glu(x, dim)
    })
}

/// Multiplies negative elements by `alpha`, as burn's [`prelu`](local::prelu). `alpha` has one
/// element, or one per channel (dimension 1).
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if `alpha` has
/// another number of elements.
#[must_use]
#[track_caller]
pub fn prelu<const D: usize>(tensor: impl Into<Operand<D>>, alpha: DTensor<1>) -> DTensor<D> {
    let rule = if alpha.dims() == [1] {
        &PRELU
    } else {
        &PRELU_PER_CHANNEL
    };
    apply(rule, (tensor.into(), alpha), |(x, alpha), _| {
        // Burn's own function uses an `alpha` without elements as one value for all channels.
        let mut channels = [1; D];
        channels[D.min(2) - 1] = alpha.dims()[0];
        let scaled = x.clone() * reshape(alpha, Shape::from(channels));
        let negative = x.clone().lower_scalar(0);
        x.mask_where(negative, scaled)
    })
}
