//! [`Precision`]: the element types that a unit computes and reduces in.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::DType;

/// Element types of a unit, apart from those of its weights; `None`: values keep the type that they have.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Precision {
    /// Of the float inputs of its forward.
    pub(crate) inputs: Option<DType>,
    /// Of the float outputs.
    pub(crate) outputs: Option<DType>,
    /// What its gradients are added up in: over the tensor-parallel ranks, and over the data-parallel ones. `None`: each
    /// in the type that its parameter is stored in.
    pub(crate) reduce: Option<DType>,
}

/// The tensor in the element type asked for. What has it already, and what is quantized, is the same tensor.
pub(super) fn cast(tensor: DispatchTensor, dtype: Option<DType>) -> DispatchTensor {
    match dtype {
        Some(dtype) if tensor.dtype() != dtype && tensor.dtype().is_float() => {
            Dispatch::float_cast(tensor, dtype.into())
        }
        _ => tensor,
    }
}
