//! Data movement between Flex tensors: each result is written once, from the peers' memory.

mod block;
mod concat;
mod element;
mod reduce;

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind, Flex};
use burn::tensor::{Bytes, DType, Shape};

use crate::memory::flex as memory;

pub(super) use concat::{concat, join};
pub(super) use reduce::{reduce, reduce_flat};

/// The Flex primitive, if it is one.
pub(super) fn primitive(tensor: &DispatchTensor) -> Option<&FlexTensor> {
    match &tensor.kind {
        DispatchTensorKind::Flex(
            BackendTensor::Float(primitive) | BackendTensor::Int(primitive) | BackendTensor::Bool(primitive),
        ) => Some(primitive),
        _ => None,
    }
}

/// The same tensor with adjacent elements, in memory that stays while a handle does: so that peers
/// can read it as a slice.
pub(super) fn settle(tensor: DispatchTensor) -> DispatchTensor {
    match primitive(&tensor) {
        Some(flex) if !flex.is_contiguous() || !memory::is_lasting(flex) => wrap(memory::copied(flex)),
        _ => tensor,
    }
}

/// A tensor of the kind that its dtype says.
fn wrap(tensor: FlexTensor) -> DispatchTensor {
    let dtype = tensor.dtype();
    let tensor: BackendTensor<Flex> = if dtype.is_float() {
        BackendTensor::Float(tensor)
    } else if dtype.is_bool() {
        BackendTensor::Bool(tensor)
    } else {
        BackendTensor::Int(tensor)
    };
    DispatchTensor { kind: DispatchTensorKind::Flex(tensor), autodiff: DispatchAutodiffContext::Disabled }
}

/// A new tensor that owns `elements`.
fn build<E: bytemuck::Pod + Send + Sync>(elements: Vec<E>, shape: Shape, dtype: DType) -> DispatchTensor {
    debug_assert_eq!(elements.len(), shape.num_elements());
    wrap(FlexTensor::new(Bytes::from_elems(elements), Layout::contiguous(shape), dtype))
}

/// The elements of a [settled](settle) tensor.
fn elements<E: bytemuck::Pod>(tensor: &FlexTensor) -> &[E] {
    let count = tensor.layout().num_elements();
    if count == 0 {
        return &[];
    }
    let size = size_of::<E>();
    let start = tensor.layout().start_offset();
    bytemuck::cast_slice(&tensor.bytes()[start * size..(start + count) * size])
}
