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
//!     let plan = Plan::new().with_style("up", Style::colwise()).with_style("down", Style::rowwise());
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
//! | `BatchNorm`, `GroupNorm`, `InstanceNorm`, `Normalization` | `[batch, channels, ..]` | the same |
//! | `LocalResponseNorm` | `[batch, channels, .., length]` | the same |
//! | `Conv1d` to `Conv3d`, `ConvTranspose1d` to `ConvTranspose3d` | `[batch, channels, ..]` | the same, of other lengths |
//! | `DeformConv2d` | `[batch, channels, ..]`, an offset, a mask | the same, of other lengths |
//! | `MaxPool1d`, `MaxPool2d`, `AvgPool1d`, `AvgPool2d`, `AdaptiveAvgPool1d` to `AdaptiveAvgPool3d` | `[batch, channels, ..]` | the same, of other lengths |
//! | `Interpolate1d`, `Interpolate2d`, `PixelShuffle`, `PixelUnshuffle` | `[batch, channels, ..]` | the same, of other lengths |
//! | `Unfold4d`, `Fold4d` | `[batch, channels, height, width]`, `[batch, rows, windows]` | the other |
//! | `Dropout`, `GaussianNoise`, `Identity`, `Activation`, the activations but `GLU` | any | the same |
//! | `SwiGlu` | `[.., d_input]` | `[.., d_output]` |
//! | `RotaryEncoding` | `[.., seq, d_head]` | the same |
//! | `PositionalEncoding` | `[batch, seq, d_model]` | the same |
//! | `CosineSimilarity`, `PairwiseDistance` | two of `[batch, features]` | `[batch]` |
//! | `PositionWiseFeedForward` | `[.., d_model]` | the same |
//! | `MultiHeadAttention` | [`MhaInput`] | [`MhaOutput`] |
//! | `TransformerEncoder`, `TransformerEncoderLayer` | [`TransformerEncoderInput`] | `[batch, seq, d_model]` |
//! | `TransformerDecoder`, `TransformerDecoderLayer` | [`TransformerDecoderInput`] | `[batch, seq_1, d_model]` |
//! | [`CrossAttention`] | query `[batch, seq_1, d_model]`, context `[batch, seq_2, d_context]`, a mask | `[batch, seq_1, d_model]` |
//! | [`GroupedQueryAttention`] | `[batch, seq, d_model]` | the same |
//! | `Rnn`, `Gru`, `Lstm`, `BiRnn`, `BiGru`, `BiLstm` | `[batch, seq, d_input]` and a first state | as burn's |
//!
//! Around a block of layers [`apply_io_layouts`] brings inputs and outputs to where the plan wants them, and
//! [`apply_io_layouts_local`] lets a block over DTensors stand in an ordinary model.
//!
//! [`CrossAttention`] and [`GroupedQueryAttention`] are this crate's own: burn-nn keeps the fields of its cross
//! attention to itself, as it does `GLU`'s (write [`activation::glu`](crate::dtensor::ops::activation::glu)). And
//! [`dropout`] of plain tensors repeats from run to run, where burn's own does not.

mod activation;
mod attention;
mod batch_norm;
mod conv;
mod cross_attention;
mod distance;
mod dropout;
mod embedding;
mod grouped;
mod heads;
mod linear;
mod noise;
mod norm;
mod padding;
mod pool;
mod position;
mod prepare;
mod rnn;
mod spatial;
mod transformer;

pub use attention::{MhaInput, MhaOutput};
pub use cross_attention::CrossAttention;
pub use dropout::dropout;
pub use grouped::{GroupedQueryAttention, GroupedQueryAttentionConfig};
pub use heads::local_heads;
pub use prepare::{ModuleTensors, apply_io_layouts, apply_io_layouts_local};
pub use rnn::LstmState;
pub use transformer::{TransformerDecoderInput, TransformerEncoderInput};

use burn::module::Param;
use burn::tensor::Tensor;

use crate::dtensor::ops::Operand;
use crate::dtensor::{DTensor, Kind};
use crate::error::OrUnwind;
use crate::param::{ParamExt, layer_styles, module_path};
use crate::watch;

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
/// use burn_dtensor::nn::apply_style;
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
///         apply_style(&self.weight, x, |x, weight| module::linear(x, weight.transpose(), None))
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
pub fn apply_style<const D: usize, const P: usize, const O: usize, K: Kind>(
    param: &Param<Tensor<P>>,
    x: DTensor<D, K>,
    forward: impl FnOnce(Operand<D, K>, DTensor<P>) -> DTensor<O>,
) -> DTensor<O> {
    let _inside = watch::entered(|| module_path(param));
    let (styles, value) = (layer_styles(param), read(param));
    let y = forward(x.pinned_each(styles.and_then(|styles| styles.input.as_ref())), value);
    match styles.and_then(|styles| styles.output.as_ref()) {
        Some(wanted) => y.redistribute_each(wanted).or_unwind(),
        None => y,
    }
}
