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
        #[doc = concat!("Elementwise, as burn's [`", stringify!($name), "`](local::", stringify!($name), ").")]
        #[must_use]
        #[track_caller]
        pub fn $name<const D: usize>(tensor: DTensor<D>, $($arg: f64),*) -> DTensor<D> {
            apply(elementwise!(@rule $name($($arg),*) $partials), tensor, |x, _| local::$name(x, $($arg),*))
        }
    )*};
}

/// `partials` under a condition on the function's parameters.
const fn only_if(condition: bool, partials: PartialRules) -> PartialRules {
    if condition { partials } else { NO_PARTIAL }
}

elementwise! {
    relu(): INCREASING,
    relu6(): NO_PARTIAL, // clamps
    leaky_relu(negative_slope): only_if(negative_slope > 0.0, INCREASING),
    thresholded_relu(alpha): only_if(alpha >= 0.0, INCREASING),
    threshold(threshold, value): only_if(value <= threshold, INCREASING),
    sigmoid(): INCREASING,
    log_sigmoid(): INCREASING,
    hard_sigmoid(alpha, beta): NO_PARTIAL, // clamps
    tanh(): INCREASING,
    tanhshrink(): INCREASING,
    hardtanh(min_val, max_val): NO_PARTIAL, // clamps
    softsign(): NO_PARTIAL,
    softplus(beta): INCREASING,
    // It falls where it becomes linear, by more the lower the threshold.
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

/// Softmaxes: what each is of a part, of `x - max`, `max` and the sum of the exponentials of the former.
macro_rules! softmaxes {
    ($($name:ident(|$x:ident| $of:expr) = (|$shifted:ident, $max:ident, $sum:ident| $value:expr));* $(;)?) => {$(
        #[doc = concat!("Along `dim`, as burn's [`", stringify!($name), "`](local::", stringify!($name), ").")]
        ///
        /// # Collective
        /// Of a dimension that is cut: every rank of the mesh. Two elements of every part are gathered in
        /// forward, and in backward the sums of their gradients scattered.
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

/// The first half of `dim` times the sigmoid of the second, as burn's [`glu`](local::glu): the
/// dimension is made whole.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if its length
/// is odd.
#[must_use]
#[track_caller]
pub fn glu<const D: usize>(tensor: DTensor<D>, dim: impl AsIndex) -> DTensor<D> {
    let dim = dim_of("glu", dim, D);
    let len = tensor.dims()[dim];
    if len % 2 == 1 {
        operand_error("glu", &[tensor.shape()], format!("dimension {dim} must have two halves, its length is {len}"))
            .unwind();
    }
    apply(&GLU.at([dim]).lens([len / 2]), tensor, |x, _| local::glu(x, dim))
}

/// Negative elements times `alpha`, of which there is one, or one per channel (dimension 1), as
/// burn's [`prelu`](local::prelu).
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if there are
/// others.
#[must_use]
#[track_caller]
pub fn prelu<const D: usize>(tensor: impl Into<Operand<D>>, alpha: DTensor<1>) -> DTensor<D> {
    let rule = if alpha.dims() == [1] { &PRELU } else { &PRELU_PER_CHANNEL };
    apply(rule, (tensor.into(), alpha), |(x, alpha), _| {
        // Burn's own reads an `alpha` without elements as one for all.
        let mut channels = [1; D];
        channels[D.min(2) - 1] = alpha.dims()[0];
        let scaled = x.clone() * reshape(alpha, Shape::from(channels));
        let negative = x.clone().lower_scalar(0);
        x.mask_where(negative, scaled)
    })
}
