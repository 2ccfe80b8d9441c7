//! burn-nn's layers over DTensors.
//!
//! [`DTensorForward`] gives each burn-nn layer a forward that takes and returns DTensors. The
//! layer's type, parameter names and records stay those of the single-device model.
//! [`parallelize`](crate::parallel::parallelize) places the layer's parameters, and the
//! [`Style`](crate::parallel::Style) of the layer determines the layouts to which it redistributes
//! its activations. A model is therefore written once, and the plan determines the communication.
//! On [one device](crate::mesh::DeviceMesh::single_device) the model needs no plan: its layers read
//! their ordinary parameters. Nor does it if only [`fully_shard`](crate::fsdp::fully_shard) or
//! [`replicate`](crate::replicate::replicate) distributes it: each rank passes its own rows as
//! `DTensor::from(x)`.
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
//! | `Dropout`, `GaussianNoise`, `Identity`, `Activation`, all activations except `GLU` | any | the same |
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
//! | `Rnn`, `Gru`, `Lstm`, `BiRnn`, `BiGru`, `BiLstm` | `[batch, seq, d_input]` and an initial state | as burn's |
//!
//! For a block of several layers, [`apply_io_layouts`] redistributes inputs and outputs to the
//! layouts that the plan declares. With [`apply_io_layouts_local`] an ordinary model can contain a
//! block that computes on DTensors.
//!
//! [`CrossAttention`] and [`GroupedQueryAttention`] are types of this crate. burn-nn's cross
//! attention has private fields, as has its `GLU` (use
//! [`activation::glu`](crate::dtensor::ops::activation::glu) instead). [`dropout`] for plain
//! tensors is reproducible from run to run, unlike burn's own.

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
pub use batch_norm::sync_batch_norm;
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
use crate::mesh::DeviceMesh;
use crate::parallel::layer_styles;
use crate::param::{module_path, placed};
use crate::watch;

/// Forward of a burn-nn layer over DTensors.
///
/// # Collective
/// Every rank of the tensor-parallel mesh must call it. The forward communicates where the layer's
/// style redistributes an activation. Outside the layer's [`unit`](fn@crate::fsdp::unit) it also
/// all-gathers the parameters.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if a parameter was not parallelized and the mesh
/// has several ranks, shapes do not match, or a collective fails.
pub trait DTensorForward<Input> {
    /// Return type of the layer's forward.
    type Output;

    /// Runs the layer's `forward` on DTensors.
    #[track_caller]
    fn forward_dtensor(&self, input: Input) -> Self::Output;
}

/// Returns the parameter as the DTensor with which a layer computes on activations on `mesh`. On a
/// mesh of one rank it need not be parallelized.
#[track_caller]
fn read<const D: usize>(param: &Param<Tensor<D>>, mesh: &DeviceMesh) -> DTensor<D> {
    if mesh.size() > 1 || layer_styles(param).is_some() {
        return placed(param).or_unwind();
    }
    DTensor::replicated_on(param.val(), mesh).or_unwind()
}

/// Returns another parameter of a layer, such as its bias, on the mesh of the layer's weight.
#[track_caller]
fn read_with<const D: usize, const W: usize>(
    weight: &DTensor<W>,
    param: Option<&Param<Tensor<D>>>,
) -> Option<DTensor<D>> {
    param.map(|param| read(param, weight.mesh()))
}

/// Runs `forward` on `x` and the value of `param`, with the input and output redistributed as the
/// layer's style requires. Use it to write the forward of a custom layer. Clones of one activation
/// share the communication of its redistribution.
///
/// ```
/// # use burn::module::{Module, Param};
/// # use burn::tensor::Tensor;
/// use burn_dtensor::dtensor::ops::module;
/// use burn_dtensor::nn::apply_style;
/// use burn_dtensor::prelude::*;
///
/// /// Computes `x @ weightᵀ` with a weight of shape `[d_out, d_in]`.
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
/// Like [`DTensorForward`].
///
/// # Panics
/// Like [`DTensorForward`].
#[track_caller]
pub fn apply_style<const D: usize, const P: usize, const O: usize, K: Kind>(
    param: &Param<Tensor<P>>,
    x: DTensor<D, K>,
    forward: impl FnOnce(Operand<D, K>, DTensor<P>) -> DTensor<O>,
) -> DTensor<O> {
    let _inside = watch::entered(|| module_path(param));
    let styles = layer_styles(param);
    let value = read(param, x.mesh());
    let y = forward(
        x.pinned_each(styles.and_then(|styles| styles.input.as_ref())),
        value,
    );
    match styles.and_then(|styles| styles.output.as_ref()) {
        Some(wanted) => y.redistribute_each(wanted).or_unwind(),
        None => y,
    }
}
