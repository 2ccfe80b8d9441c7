//! burn-nn's own layers, over DTensors.
//!
//! [`DTensorForward`] gives each layer a second forward. The layer's type, parameter names and
//! records stay those of the single-device model; [`parallelize`](crate::parallel::parallelize)
//! places its parameters, and the [`Style`](crate::parallel::Style) that came with them says where
//! the layer brings its activations. A model is written once, and the plan decides what it sends.
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::prelude::*;
//! use burn_dtensor::prelude::*;
//!
//! #[derive(Module, Debug)]
//! struct Mlp {
//!     up: Linear,
//!     down: Linear,
//! }
//!
//! impl Mlp {
//!     fn forward(&self, x: DTensor<3>) -> DTensor<3> {
//!         self.down.forward_dtensor(self.up.forward_dtensor(x).tanh())
//!     }
//! }
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//!     let device = world.device().clone().autodiff();
//!     let mlp = Mlp { up: LinearConfig::new(8, 32).init(&device), down: LinearConfig::new(32, 8).init(&device) };
//!     let plan = Plan::new().with("up", Style::colwise()).with("down", Style::rowwise());
//!     let mlp = parallelize(mlp, &mesh, plan)?;
//!     let x = DTensor::ones([4, 5, 8], &mesh, &[Placement::Replicate], &device)?;
//!     let y = mlp.forward(x); // one all-reduce
//!     assert_eq!(y.placements(), [Placement::Replicate]);
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! | layer | input | output |
//! |---|---|---|
//! | `Linear` | `[.., d_input]` | `[.., d_output]` |
//! | `Embedding` | `[batch, seq]`, Int | `[batch, seq, d_model]` |
//! | `LayerNorm`, `RmsNorm` | `[.., d_model]` | the same |
//! | `GroupNorm` | `[batch, channels, ..]` | the same |
//! | `Dropout`, activations | any | the same |
//! | `SwiGlu` | `[.., d_input]` | `[.., d_output]` |
//! | `RotaryEncoding` | `[.., seq, d_head]` | the same |
//! | `MultiHeadAttention` | [`MhaInput`] | [`MhaOutput`] |
//! | [`GroupedQueryAttention`] | `[batch, seq, d_model]` | the same |
//!
//! Around a block of layers [`prepared`] brings inputs and outputs to where the plan wants them, and
//! [`prepared_local`] lets a block over DTensors stand in an ordinary model.
//!
//! The last is this crate's own: burn-nn keeps the fields of its grouped attention to itself. And
//! [`dropout`] of plain tensors repeats from run to run, where burn's own does not.

mod activation;
mod attention;
mod dropout;
mod embedding;
mod grouped;
mod heads;
mod linear;
mod norm;
mod prepare;
mod rope;

pub use attention::{MhaInput, MhaOutput};
pub use dropout::dropout;
pub use grouped::{GroupedQueryAttention, GroupedQueryAttentionConfig};
pub use heads::local_heads;
pub use prepare::{ModuleTensors, prepared, prepared_local};

use burn::module::Param;
use burn::tensor::Tensor;

use crate::dtensor::ops::Operand;
use crate::dtensor::{DTensor, Kind};
use crate::error::OrUnwind;
use crate::param::{ParamExt, layer_styles};

/// The forward of a burn-nn layer over DTensors.
///
/// # Collective
/// Every rank of the tensor-parallel mesh must run it: what its parameters' style brings elsewhere
/// is communicated, and outside the layer's [`unit`](fn@crate::fsdp::unit) its parameters too.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error): a parameter that was not parallelized, shapes that
/// do not fit, a collective that fails.
pub trait DTensorForward<Input> {
    /// What the layer returns.
    type Output;

    /// As the layer's `forward`, on DTensors.
    #[track_caller]
    fn forward_dtensor(&self, input: Input) -> Self::Output;
}

/// A parameter as a layer computes with it.
#[track_caller]
fn read<const D: usize>(param: &Param<Tensor<D>>) -> DTensor<D> {
    param.dtensor().or_unwind()
}

/// Runs a layer on `x` with `param`, whose style says where the layer brings its input and output: what
/// the forward of a layer of one's own is made of. Clones of one activation share what that sends.
///
/// ```
/// # use burn::module::{Module, Param};
/// # use burn::tensor::Tensor;
/// use burn_dtensor::dtensor::ops::module;
/// use burn_dtensor::nn::styled;
/// use burn_dtensor::prelude::*;
///
/// /// `x @ weightᵀ`, of a weight `[d_out, d_in]`.
/// #[derive(Module, Debug)]
/// struct Projection {
///     weight: Param<Tensor<2>>,
/// }
///
/// impl Projection {
///     fn forward(&self, x: DTensor<3>) -> DTensor<3> {
///         styled(&self.weight, x, |x, weight| module::linear(x, weight.transpose(), None))
///     }
/// }
/// ```
///
/// # Collective
/// As [`DTensorForward`].
///
/// # Panics
/// As [`DTensorForward`].
#[track_caller]
pub fn styled<const D: usize, const P: usize, const O: usize, K: Kind>(
    param: &Param<Tensor<P>>,
    x: DTensor<D, K>,
    forward: impl FnOnce(Operand<D, K>, DTensor<P>) -> DTensor<O>,
) -> DTensor<O> {
    let (styles, value) = (layer_styles(param), read(param));
    let y = forward(x.pinned_each(styles.and_then(|styles| styles.input.as_ref())), value);
    match styles.and_then(|styles| styles.output.as_ref()) {
        Some(wanted) => y.redistribute_each(wanted).or_unwind(),
        None => y,
    }
}
