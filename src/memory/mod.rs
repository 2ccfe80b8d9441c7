//! Whose a tensor's memory is.
//!
//! A tensor is a handle to memory that lasts as long as a handle does, but for a gathered parameter's: that is
//! memory which its unit takes back and fills again. What outlives the operation at hand, or is read by other
//! ranks, is in memory that lasts.

#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
pub(crate) mod flex;

use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind};

/// Whether the memory of a plain tensor stays as it is for as long as a handle to it lives.
pub(crate) fn is_lasting(tensor: &DispatchTensor) -> bool {
    match &tensor.kind {
        #[cfg(feature = "flex")]
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => flex::is_lasting(tensor),
        #[cfg(feature = "cube")]
        DispatchTensorKind::Cube(_) => cube::primitive(tensor).is_none_or(cube::is_lasting),
        // A unit gathers floats.
        _ => true,
    }
}

/// Whether two plain float tensors are one piece of memory.
pub(crate) fn is_same(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    match (&a.kind, &b.kind) {
        #[cfg(feature = "flex")]
        (DispatchTensorKind::Flex(BackendTensor::Float(a)), DispatchTensorKind::Flex(BackendTensor::Float(b))) => {
            flex::is_same(a, b)
        }
        #[cfg(feature = "cube")]
        (DispatchTensorKind::Cube(_), DispatchTensorKind::Cube(_)) => {
            cube::primitive(a).zip(cube::primitive(b)).is_some_and(|(a, b)| cube::is_same(a, b))
        }
        _ => false,
    }
}
