//! [`TensorTree`]: inputs and outputs of units.

mod containers;
mod derive;
mod layers;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;

use crate::dtensor::{DTensor, Kind};
use crate::error::OrUnwind;

/// Function that is applied to each tensor of a structure.
pub type TensorMapFn<'a> = &'a mut (dyn FnMut(DispatchTensor) -> DispatchTensor + 'a);

/// Input or output of a unit: a structure whose tensors can be mapped.
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
    /// Replaces every tensor, of any kind, by the result of `f`, in a fixed order.
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self;

    /// Replaces every float tensor by the result of `f`, in a fixed order.
    fn map_floats(self, f: TensorMapFn<'_>) -> Self {
        self.map_tensors(&mut |tensor| {
            let dtype = tensor.dtype();
            // A quantized tensor is a float tensor, too.
            if dtype.is_int() || dtype.is_uint() || dtype.is_bool() { tensor } else { f(tensor) }
        })
    }
}

impl<const D: usize, K: Kind> TensorTree for Tensor<D, K> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        Tensor::from_dispatch(f(self.into_dispatch()))
    }
}

/// Maps the local tensor. If `f` changes its shape, the global shape changes by the same factor.
impl<const D: usize, K: Kind> TensorTree for DTensor<D, K> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        let spec = self.spec().clone();
        let before = self.local().dims();
        let local = self.to_local().map_tensors(f);
        let after = local.dims();
        if after == before {
            let spec = spec.in_dtype(local.dtype());
            return DTensor::from_parts(local, spec);
        }
        let scaled = |dim: usize| (spec.shape()[dim] * after[dim]).checked_div(before[dim]).unwrap_or(after[dim]);
        let shape: [usize; D] = std::array::from_fn(scaled);
        DTensor::from_local_with_layout(local, spec.mesh(), spec.layout().clone(), shape).or_unwind()
    }
}

/// Implements `TensorTree` for types without tensors.
macro_rules! without_tensors {
    ($([$($generics:tt)*] $ty:ty),* $(,)?) => {$(
        impl<$($generics)*> $crate::param::TensorTree for $ty {
            fn map_tensors(self, _: $crate::param::io::TensorMapFn<'_>) -> Self {
                self
            }
        }
    )*};
}
use without_tensors;
