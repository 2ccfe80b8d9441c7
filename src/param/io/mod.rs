//! [`TensorTree`]: inputs and outputs of units.

mod containers;
mod derive;
mod layers;

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Int, Tensor};

use crate::dtensor::DTensor;

/// Function that is applied to each float tensor of a structure.
pub type FloatMapFn<'a> = &'a mut (dyn FnMut(DispatchTensor) -> DispatchTensor + 'a);

/// Input or output of a unit: a structure whose float tensors can be mapped.
///
/// Implemented for
///
/// * tensors and DTensors of every rank and kind;
/// * tuples of up to twelve elements, arrays, `Vec`, `VecDeque`, `Option`, `Result`, `Box`, `Rc`, `Arc`, `BTreeMap`
///   and `HashMap` of types that implement it;
/// * burn's `LstmState`, `RnnState` and `MhaOutput`, and the inputs and outputs of [`nn`](crate::nn);
/// * numbers, text, shapes, `TensorData`, ranges and the like, which are passed through;
/// * references, which are passed through: the referenced tensors are treated as if the closure had captured them.
///   Their gradients are correct. However, [mixed precision](crate::fsdp::MixedPrecisionPolicy) does not cast them,
///   and weights stay unsharded longer if they are tracked.
///
/// Implement it for your own structs and enums with [`tensor_tree!`](crate::tensor_tree). Some of burn's inputs
/// have private fields (`TransformerEncoderInput`, `TransformerDecoderInput`, `MhaInput`). Pass their tensors to
/// the unit as a tuple, and construct the input inside.
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
/// The compiler rejects a type that does not implement it:
///
/// ```compile_fail,E0277
/// # use burn::nn::transformer::{TransformerEncoder, TransformerEncoderInput};
/// # use burn::tensor::Tensor;
/// # use burn_dtensor::fsdp::unit;
/// fn forward(encoder: &TransformerEncoder, x: TransformerEncoderInput) -> Tensor<3> {
///     unit(encoder, x, |encoder, x| encoder.forward(x))
/// }
/// ```
// Where a reference would be accepted, the compiler advises one and shows only the message, without label and notes.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an input or output of a unit. For your own struct or enum, name its fields, as in \
               `burn_dtensor::tensor_tree! {{ struct Batch {{ tokens, mask }} }}`. Do not borrow it: mixed precision does \
               not cast tensors behind a reference, and weights stay unsharded longer",
    label = "not composed of tensors that can be mapped",
    note = "if the fields are private, pass its tensors as a tuple and construct it inside the closure, \
            or let the closure capture it: gradients are correct then, too"
)]
pub trait TensorTree: Sized {
    /// Replaces every float tensor by the result of `f`, in a fixed order.
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

/// Implements `TensorTree` for types without float tensors.
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
