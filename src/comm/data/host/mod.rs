//! Data plane for Flex tensors. Each result is written once, directly from the memory of the peers. A result that
//! is identical on all ranks is written once for all of them.

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
pub(in crate::comm) use collective_cache::CollectiveCache;
pub(super) use collective_cache::ReduceOperands;
pub(super) use copy::{GatherCopyPlan, concat};
pub(in crate::comm) use result_cache::SharedResultCache;
pub(super) use result_cache::{Owner, ResultRetention};

/// Returns a tensor with the same values, whose elements are adjacent and whose memory lives as long as a handle,
/// so that peers can read it as a slice.
pub(super) fn settle(tensor: DispatchTensor) -> DispatchTensor {
    match primitive(&tensor) {
        Some(flex) if !flex.is_contiguous() || !memory::is_lasting(flex) => wrap(memory::copied(flex)),
        _ => tensor,
    }
}

/// Returns true if a handle to the Flex tensor keeps no memory alive except for its elements.
pub(super) fn is_alone(tensor: &DispatchTensor) -> bool {
    primitive(tensor).is_some_and(memory::is_alone)
}

/// Returns a view of `range` along `dim` of a Flex tensor, if its elements are adjacent.
pub(super) fn adjacent(tensor: &DispatchTensor, dim: usize, range: Range<usize>) -> Option<DispatchTensor> {
    let part = primitive(tensor)?.narrow(dim, range.start, range.len());
    part.is_contiguous().then(|| wrap(part))
}

/// Wraps a Flex tensor as the kind that its dtype determines.
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
