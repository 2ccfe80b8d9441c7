//! Data movement between Flex tensors: each result is written once, from the peers' memory; what all ranks get alike, once for all
//! of them.

mod block;
mod collective_cache;
mod cooperative;
mod copy;
mod element;
mod reduce;
mod result_cache;
#[cfg(test)]
mod tests;

use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind, Flex};

use crate::memory::flex as memory;

pub(super) use crate::memory::flex::primitive;
pub(super) use collective_cache::{CollectiveCache, ReduceOperands};
pub(super) use copy::{GatherCopyPlan, concat};
pub(super) use result_cache::{Owner, ResultRetention, SharedResultCache};

/// The same tensor with adjacent elements, in memory that stays while a handle does: so that peers
/// can read it as a slice.
pub(super) fn settle(tensor: DispatchTensor) -> DispatchTensor {
    match primitive(&tensor) {
        Some(flex) if !flex.is_contiguous() || !memory::is_lasting(flex) => wrap(memory::copied(flex)),
        _ => tensor,
    }
}

/// Whether a handle to the Flex tensor keeps no memory but its elements.
pub(super) fn is_alone(tensor: &DispatchTensor) -> bool {
    primitive(tensor).is_some_and(memory::is_alone)
}

/// The elements of a Flex tensor in `range` of `dim`, in place, if they are adjacent.
pub(super) fn adjacent(tensor: &DispatchTensor, dim: usize, range: Range<usize>) -> Option<DispatchTensor> {
    let part = primitive(tensor)?.narrow(dim, range.start, range.len());
    part.is_contiguous().then(|| wrap(part))
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
