//! [`TensorTree`]: what may go in and out of a unit.

mod containers;
mod derive;
mod layers;

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Int, Tensor};

use crate::dtensor::DTensor;

/// What is done to each float tensor of a structure.
pub type FloatMapFn<'a> = &'a mut (dyn FnMut(DispatchTensor) -> DispatchTensor + 'a);

/// A unit's input or output: any structure whose float tensors can be mapped.
///
/// Implemented for
///
/// * tensors and DTensors of every rank and kind;
/// * tuples of up to twelve, arrays, `Vec`, `VecDeque`, `Option`, `Result`, `Box`, `Rc`, `Arc`, `BTreeMap` and `HashMap`
///   of what implements it;
/// * burn's `LstmState`, `RnnState` and `MhaOutput`, and the inputs and outputs of [`nn`](crate::nn);
/// * numbers, text, shapes, `TensorData`, ranges and the like, which pass through;
/// * references, which pass through: what is behind one is as if the closure had captured it. Gradients are right; but
///   [mixed precision](crate::fsdp::MixedPrecisionPolicy) does not cast it, and weights are held for longer if it is
///   tracked.
///
/// Structs and enums of your own become inputs and outputs by [`tensor_tree!`](crate::tensor_tree). The fields of some
/// of burn's inputs are private (`TransformerEncoderInput`, `TransformerDecoderInput`, `MhaInput`): give the unit their
/// tensors as a tuple, and make the input of them inside.
///
/// ```
/// # use burn::nn::transformer::{TransformerEncoder, TransformerEncoderInput};
/// # use burn::tensor::{Bool, Tensor};
/// # use burn_dtensor::fsdp::unit;
/// fn forward(encoder: &TransformerEncoder, x: Tensor<3>, mask: Tensor<2, Bool>) -> Tensor<3> {
///     unit(encoder, (x, mask), |encoder, (x, mask)| encoder.forward(TransformerEncoderInput::new(x).mask_pad(mask)))
/// }
/// ```
///
/// A type that it is not implemented for is refused by the compiler:
///
/// ```compile_fail,E0277
/// # use burn::nn::transformer::{TransformerEncoder, TransformerEncoderInput};
/// # use burn::tensor::Tensor;
/// # use burn_dtensor::fsdp::unit;
/// fn forward(encoder: &TransformerEncoder, x: TransformerEncoderInput) -> Tensor<3> {
///     unit(encoder, x, |encoder, x| encoder.forward(x))
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no input or output of a unit",
    label = "not made of tensors that can be mapped",
    note = "for a struct or an enum of your own, name its fields: `burn_dtensor::tensor_tree! {{ struct Batch {{ tokens, \
            mask }} }}`",
    note = "what others have made with private fields, take apart into a tuple of its tensors, and put together again \
            inside; or let the closure capture it, which is right too, gradients included"
)]
pub trait TensorTree: Sized {
    /// Replaces every float tensor by `f` of it, in a fixed order.
    fn map_floats(self, f: FloatMapFn<'_>) -> Self;
}

impl<const D: usize> TensorTree for Tensor<D> {
    fn map_floats(self, f: FloatMapFn<'_>) -> Self {
        Tensor::from_dispatch(f(self.into_dispatch()))
    }
}

impl<const D: usize> TensorTree for DTensor<D> {
    fn map_floats(self, f: FloatMapFn<'_>) -> Self {
        let spec = self.spec().clone();
        let local = self.to_local().map_floats(f);
        let spec = spec.in_dtype(local.dtype());
        DTensor::from_parts(local, spec)
    }
}

/// Types without floats to map.
macro_rules! without_floats {
    ($([$($generics:tt)*] $ty:ty),* $(,)?) => {$(
        impl<$($generics)*> $crate::param::TensorTree for $ty {
            fn map_floats(self, _: $crate::param::io::FloatMapFn<'_>) -> Self {
                self
            }
        }
    )*};
}
use without_floats;

without_floats!(
    [const D: usize] Tensor<D, Int>,
    [const D: usize] Tensor<D, Bool>,
    [const D: usize] DTensor<D, Int>,
    [const D: usize] DTensor<D, Bool>,
);
