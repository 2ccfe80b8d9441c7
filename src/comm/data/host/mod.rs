//! Data plane for Flex tensors. Each result is written once, directly from the memory of the peers.
//! A result that is identical on all ranks is written once for all of them.

mod block;
mod cooperative;
mod copy;
mod element;
mod plane;
mod reduce;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use burn::backend::flex::FlexTensor;
use burn::backend::{
    BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind, Flex,
    TensorMetadata,
};
use burn::tensor::Device;
use smallvec::SmallVec;

use crate::comm::ReduceOp;
use crate::comm::backend::ranges::Ranges;
use crate::comm::control::match_table::OpHandle;
use crate::comm::plan::offered;
use crate::comm::transport::Payload;
use crate::memory::flex as memory;
use cooperative::CachedResults;
use copy::GatherSources;

use super::has_kernel;
use crate::memory::flex::primitive;
use cooperative::{Owner, ResultRetention, SharedResultCache};
use copy::{GatherCopyPlan, concat};
pub(super) use plane::{HostContribution, HostPlane};
use reduce::ReduceOperands;

/// Data that every rank needs of a collective and that is identical for all: the addresses of the
/// tensors of all ranks, and the shared results. The first rank creates it; it is stored in the
/// contribution of the first member. If each rank looked the tensors up, the work would grow with
/// the square of the number of ranks, for any size of the tensors.
#[derive(Debug, Default)]
struct CollectiveCache {
    parts: OnceLock<Option<GatherSources>>,
    /// Operands of the reduction of each tensor.
    terms: OnceLock<Box<[OnceLock<Option<ReduceOperands>>]>>,
    /// Shared results.
    cached: OnceLock<Arc<CachedResults>>,
}

impl CollectiveCache {
    /// Returns the owner of the shared results of the collective `op`. `waited` adds up the time
    /// that the rank waits for others.
    pub fn owner<'a>(
        &'a self,
        cache: &'a SharedResultCache,
        op: OpHandle,
        keep: ResultRetention,
        waited: &'a Cell<Duration>,
    ) -> Owner<'a> {
        Owner {
            cache,
            op,
            cached: self.cached.get_or_init(Arc::default),
            keep,
            waited,
        }
    }

    /// Returns the shards that an all-gather joins, by rank and tensor; `None` if they are not all
    /// Flex tensors.
    pub fn gathered<'a>(
        &self,
        copies: &GatherCopyPlan,
        parts: impl FnOnce() -> Option<Vec<Vec<&'a FlexTensor>>>,
    ) -> Option<&GatherSources> {
        offered(&self.parts, || Some(copies.sources(&parts()?))).as_ref()
    }

    /// Returns the operands of the reduction of tensor `index` of `count`; `None` if they are not
    /// all Flex tensors.
    pub fn terms<'a>(
        &self,
        (index, count): (usize, usize),
        terms: impl FnOnce() -> Option<SmallVec<[&'a FlexTensor; 8]>>,
    ) -> Option<&ReduceOperands> {
        let all = offered(&self.terms, || {
            (0..count).map(|_| OnceLock::new()).collect()
        });
        offered(&all[index], || Some(ReduceOperands::new(&terms()?))).as_ref()
    }
}

/// Returns a tensor with the same values, whose elements are adjacent and whose memory lives as
/// long as a handle, so that peers can read it as a slice.
pub(super) fn contiguous(tensor: DispatchTensor) -> DispatchTensor {
    match primitive(&tensor) {
        Some(flex) if !flex.is_contiguous() || !memory::is_lasting(flex) => {
            wrap(memory::copied(flex))
        }
        _ => tensor,
    }
}

/// Concatenates the blocks of `sources` along `dim`, if they are Flex tensors and `device` is their
/// device.
pub(super) fn joined(
    sources: &[(&DispatchTensor, Ranges)],
    dim: usize,
    device: &Device,
) -> Option<DispatchTensor> {
    // Received data is on the host, whatever the rank's device is.
    if sources[0].0.device() != *device.as_dispatch() {
        return None;
    }
    let primitives = sources
        .iter()
        .map(|(tensor, ranges)| Some((primitive(tensor)?, ranges.clone())));
    let sources: Vec<_> = primitives.collect::<Option<_>>()?;
    Some(concat(&sources, dim))
}

/// Reduces the block `ranges` of the operands, if all are Flex tensors and `op` has a kernel.
pub(super) fn reduced(
    operands: &[&DispatchTensor],
    ranges: &Ranges,
    op: ReduceOp,
) -> Option<DispatchTensor> {
    if !has_kernel(op) {
        return None;
    }
    let operands: Option<SmallVec<[_; 8]>> = operands.iter().copied().map(primitive).collect();
    Some(ReduceOperands::new(&operands?).reduce(ranges, op))
}

/// Returns the elements of a row-major Flex tensor, in its own memory.
pub(super) fn payload(tensor: &DispatchTensor) -> Option<Payload> {
    primitive(tensor).map(|flex| -> Payload { Arc::new(Elements(flex.clone())) })
}

/// Elements of a Flex tensor, in its own memory.
struct Elements(FlexTensor);

impl AsRef<[u8]> for Elements {
    fn as_ref(&self) -> &[u8] {
        memory::elements(&self.0).expect("the tensor is row-major")
    }
}

/// Returns true if a handle to the Flex tensor keeps no memory alive except for its elements.
pub(super) fn is_alone(tensor: &DispatchTensor) -> bool {
    primitive(tensor).is_some_and(memory::is_alone)
}

/// Returns a view of `range` along `dim` of a Flex tensor, if its elements are adjacent.
pub(super) fn adjacent(
    tensor: &DispatchTensor,
    dim: usize,
    range: Range<usize>,
) -> Option<DispatchTensor> {
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
    DispatchTensor {
        kind: DispatchTensorKind::Flex(tensor),
        autodiff: DispatchAutodiffContext::Disabled,
    }
}
