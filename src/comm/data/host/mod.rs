//! Data plane for Flex tensors. Each result is written once, directly from the memory of the peers.
//! A result that is identical on all ranks is written once for all of them.

mod block;
mod cooperative;
mod copy;
mod element;
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
};
use smallvec::SmallVec;

use crate::comm::control::match_table::OpHandle;
use crate::comm::plan::offered;
use crate::memory::flex as memory;
use cooperative::CachedResults;
use copy::GatherSources;

pub(super) use crate::memory::flex::primitive;
pub(in crate::comm) use cooperative::SharedResultCache;
pub(super) use cooperative::{Owner, ResultRetention};
pub(super) use copy::{GatherCopyPlan, concat};
pub(super) use reduce::ReduceOperands;

/// Data that every rank needs of a collective and that is identical for all: the addresses of the
/// tensors of all ranks, and the shared results. The first rank creates it; it is stored in the
/// contribution of the first member. If each rank looked the tensors up, the work would grow with
/// the square of the number of ranks, for any size of the tensors.
#[derive(Debug, Default)]
pub(in crate::comm) struct CollectiveCache {
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
