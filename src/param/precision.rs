//! [`Precision`]: the element types in which a unit computes and reduces.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::DType;

/// Element types of a unit, except those of its weights. `None` keeps the type of each value.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Precision {
    /// Element type of the float inputs of its forward.
    pub(crate) inputs: Option<DType>,
    /// Element type of the float outputs of its forward.
    pub(crate) outputs: Option<DType>,
    /// Element type in which gradients are summed, over the tensor-parallel and over the data-parallel ranks.
    /// `None` uses the type in which each parameter is stored.
    pub(crate) reduce: Option<DType>,
}

/// Casts `tensor` to `dtype`. Returns it unchanged if it already has that type, or if it is not a float tensor
/// (quantized tensors, for example).
pub(super) fn cast(tensor: DispatchTensor, dtype: Option<DType>) -> DispatchTensor {
    match dtype {
        Some(dtype) if tensor.dtype() != dtype && tensor.dtype().is_float() => {
            Dispatch::float_cast(tensor, dtype.into())
        }
        _ => tensor,
    }
}
