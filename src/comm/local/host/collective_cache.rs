//! [`CollectiveCache`]: data that every rank needs of a collective and that is identical for all; the first rank
//! creates it.
//!
//! It has the addresses of the tensors of all ranks, and the shared results. If each rank looked them up, the work
//! would grow with the square of the number of ranks, for any size of the tensors.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::Shape;
use smallvec::SmallVec;

use super::super::match_table::OpHandle;
use super::cooperative::{self, CooperativeResult, PartitionedJob, WORTH};
use super::copy::{GatherCopyPlan, GatherSources};
use super::reduce::{dtype_of, reduce, reduce_flat};
use super::result_cache::{CachedResults, Owner, ResultOwner, ResultRetention, SharedResultCache};
use super::{primitive, wrap};
use crate::comm::ReduceOp;
use crate::comm::backend::ranges::{Ranges, full};
use crate::comm::plan::offered;
use crate::kernels::flex::{Ends, OutputBuffers, PinnedSources, Sources, stream};
use crate::memory::HostMemoryPool;
use crate::placement::chunk;

/// Cache of one collective, stored in the contribution of the first member.
#[derive(Debug, Default)]
pub(in crate::comm::local) struct CollectiveCache {
    parts: OnceLock<Option<GatherSources>>,
    /// Operands of the reduction of each tensor.
    terms: OnceLock<Box<[OnceLock<Option<ReduceOperands>>]>>,
    /// Shared results.
    bag: OnceLock<Arc<CachedResults>>,
}

impl CollectiveCache {
    /// Returns the owner of the shared results of the collective `ticket`. `waited` adds up the time that the rank
    /// waits for others.
    pub fn owner<'a>(
        &'a self,
        shelf: &'a SharedResultCache,
        ticket: OpHandle,
        keep: ResultRetention,
        waited: &'a Cell<Duration>,
    ) -> Owner<'a> {
        let results = ResultOwner { shelf, ticket, bag: self.bag.get_or_init(Arc::default), keep };
        Owner { results, waited }
    }

    /// Returns the shards that an all-gather joins, by rank and tensor; `None` if they are not all Flex tensors.
    pub fn gathered<'a>(
        &self,
        joints: &GatherCopyPlan,
        parts: impl FnOnce() -> Option<Vec<Vec<&'a FlexTensor>>>,
    ) -> Option<&GatherSources> {
        offered(&self.parts, || Some(joints.sources(&parts()?))).as_ref()
    }

    /// Returns the operands of the reduction of tensor `index` of `count`; `None` if they are not all Flex tensors.
    pub fn terms<'a>(
        &self,
        (index, count): (usize, usize),
        terms: impl FnOnce() -> Option<SmallVec<[&'a FlexTensor; 8]>>,
    ) -> Option<&ReduceOperands> {
        let all = offered(&self.terms, || (0..count).map(|_| OnceLock::new()).collect());
        offered(&all[index], || Some(ReduceOperands::new(&terms()?))).as_ref()
    }
}

/// Operands of a reduction: tensors of one shape and dtype, one per rank.
#[derive(Debug)]
pub(in crate::comm::local) struct ReduceOperands {
    terms: PinnedSources,
    shape: Shape,
    full: CooperativeResult<ReduceSlices>,
}

impl ReduceOperands {
    /// Returns `None` if they are not all Flex tensors.
    pub fn of(terms: &[DispatchTensor]) -> Option<Self> {
        let terms: Option<SmallVec<[_; 8]>> = terms.iter().map(primitive).collect();
        Some(Self::new(&terms?))
    }

    fn new(terms: &[&FlexTensor]) -> Self {
        let shape = terms[0].layout().shape().clone();
        Self { terms: PinnedSources::of(terms), shape, full: CooperativeResult::default() }
    }

    /// Returns the reduction of the block `ranges`.
    pub fn reduce(&self, ranges: &Ranges, op: ReduceOp) -> DispatchTensor {
        wrap(reduce(&self.terms.get(), &self.shape, ranges, op))
    }

    /// Writes the reduction of all elements to `to`. Uses streaming stores if the buffer has so many `bytes` that
    /// it exceeds the caches.
    ///
    /// # Safety
    /// `to` points to aligned memory for one operand, which no other thread reads or writes.
    pub unsafe fn reduce_into(&self, op: ReduceOp, to: *mut u8, bytes: usize) {
        // SAFETY: the caller guarantees it.
        unsafe { reduce_flat(&self.terms.get(), 0..self.shape.num_elements(), op, to, stream::pays(bytes)) }
    }

    /// Returns the reduction of all elements. A large one is computed by all local ranks together and shared, if it
    /// has an `owner`.
    pub fn reduce_full(&self, op: ReduceOp, owner: Option<Owner>) -> DispatchTensor {
        let (terms, elements) = (self.terms.get(), self.shape.num_elements());
        match owner.filter(|_| elements * dtype_of(&terms).size() * terms.len() >= WORTH) {
            Some(owner) => {
                // SAFETY: all ranks have the operands of the same collective, and agree on the operation.
                let mut complete = unsafe { self.full.get(&ReduceJob { terms, shape: &self.shape, op }, owner) };
                wrap(complete.pop().expect("a reduction has one result"))
            }
            None => self.reduce(&full(&self.shape[..]), op),
        }
    }
}

/// Division of a reduction into slices of nearly equal length. If `streams`, they are written with streaming
/// stores.
#[derive(Debug)]
struct ReduceSlices {
    count: usize,
    streams: bool,
}

/// Minimum number of bytes that a slice reads, and that it writes.
const READ: usize = 512 << 10;
const WRITTEN: usize = 16 << 10;

/// Reduction of all elements of the operands.
struct ReduceJob<'a> {
    terms: Sources<'a>,
    shape: &'a Shape,
    op: ReduceOp,
}

// SAFETY: the slices are disjoint and cover all elements.
unsafe impl PartitionedJob for ReduceJob<'_> {
    type Partition = ReduceSlices;

    fn begin(&self, home: &Arc<HostMemoryPool>) -> (OutputBuffers, ReduceSlices, usize) {
        let size = dtype_of(&self.terms).size();
        let bytes = self.shape.num_elements() * size;
        let worth = (bytes * self.terms.len() / READ).min(bytes / WRITTEN);
        let count = worth.clamp(1, self.terms.len() * cooperative::PARTS_PER_RANK);
        (
            OutputBuffers::new(Some(home), [self.shape], size),
            ReduceSlices { count, streams: stream::pays(bytes) },
            count,
        )
    }

    unsafe fn make(&self, slices: &ReduceSlices, index: usize, to: &Ends<u8>) {
        let range = chunk(self.shape.num_elements(), slices.count, index);
        // SAFETY: the caller guarantees it; the operands have as many elements as the result.
        unsafe { reduce_flat(&self.terms, range, self.op, to.start(0), slices.streams) }
    }

    unsafe fn finish(&self, targets: OutputBuffers) -> Vec<FlexTensor> {
        // SAFETY: the caller guarantees it.
        unsafe { targets.finish([self.shape], dtype_of(&self.terms)).collect() }
    }
}
