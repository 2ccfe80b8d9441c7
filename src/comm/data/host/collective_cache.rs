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

use super::cooperative::{CooperativeResult, PartitionedJob};
use super::copy::{GatherCopyPlan, GatherSources};
use super::reduce::{dtype_of, reduce, reduce_flat};
use super::result_cache::{CachedResults, Owner, ResultOwner, ResultRetention, SharedResultCache};
use super::{primitive, wrap};
use crate::comm::ReduceOp;
use crate::comm::backend::ranges::{Ranges, full};
use crate::comm::control::match_table::OpHandle;
use crate::comm::plan::offered;
use crate::kernels::flex::{OutputBuffers, OutputPtrs, Sources};
use crate::memory::{HostMemoryPool, HostTuning};
use crate::placement::chunk;

/// Cache of one collective, stored in the contribution of the first member.
#[derive(Debug, Default)]
pub(in crate::comm) struct CollectiveCache {
    parts: OnceLock<Option<GatherSources>>,
    /// Operands of the reduction of each tensor.
    terms: OnceLock<Box<[OnceLock<Option<ReduceOperands>>]>>,
    /// Shared results.
    cached: OnceLock<Arc<CachedResults>>,
}

impl CollectiveCache {
    /// Returns the owner of the shared results of the collective `op`. `waited` adds up the time that the rank
    /// waits for others.
    pub fn owner<'a>(
        &'a self,
        cache: &'a SharedResultCache,
        op: OpHandle,
        keep: ResultRetention,
        waited: &'a Cell<Duration>,
    ) -> Owner<'a> {
        let results = ResultOwner { cache, op, cached: self.cached.get_or_init(Arc::default), keep };
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
pub(in crate::comm) struct ReduceOperands {
    terms: Sources,
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
        Self { terms: Sources::of(terms.iter().copied()), shape, full: CooperativeResult::default() }
    }

    /// Returns the reduction of the block `ranges`.
    pub fn reduce(&self, ranges: &Ranges, op: ReduceOp) -> DispatchTensor {
        wrap(reduce(&self.terms, &self.shape, ranges, op))
    }

    /// Writes the reduction of all elements to `to`.
    ///
    /// # Safety
    /// `to` points to aligned memory for one operand, which no other thread reads or writes.
    pub unsafe fn reduce_into(&self, op: ReduceOp, to: *mut u8) {
        // SAFETY: the caller guarantees it.
        unsafe { reduce_flat(&self.terms, 0..self.shape.num_elements(), op, to) }
    }

    /// Returns the reduction of all elements. A large one is computed by all local ranks together and shared, if it
    /// has an `owner`.
    pub fn reduce_full(&self, op: ReduceOp, owner: Option<Owner>) -> DispatchTensor {
        let (terms, elements) = (&self.terms, self.shape.num_elements());
        match owner.filter(|_| elements * dtype_of(terms).size() * terms.len() >= HostTuning::get().shared_bytes) {
            Some(owner) => {
                // SAFETY: all ranks have the operands of the same collective, and agree on the operation.
                let mut complete = unsafe { self.full.get(&ReduceJob { terms, shape: &self.shape, op }, owner) };
                wrap(complete.pop().expect("a reduction has one result"))
            }
            None => self.reduce(&full(&self.shape[..]), op),
        }
    }
}

/// Number of slices of nearly equal length into which a reduction is divided.
#[derive(Debug)]
struct ReduceSlices(usize);

/// Reduction of all elements of the operands.
struct ReduceJob<'a> {
    terms: &'a Sources,
    shape: &'a Shape,
    op: ReduceOp,
}

// SAFETY: the slices are disjoint and cover all elements.
unsafe impl PartitionedJob for ReduceJob<'_> {
    type Partition = ReduceSlices;

    fn begin(&self, home: &Arc<HostMemoryPool>) -> (OutputBuffers, ReduceSlices, usize) {
        let size = dtype_of(self.terms).size();
        let bytes = self.shape.num_elements() * size;
        let HostTuning { task_bytes, task_output_bytes, tasks_per_worker, .. } = *HostTuning::get();
        let worth = (bytes * self.terms.len() / task_bytes).min(bytes / task_output_bytes);
        let count = worth.clamp(1, self.terms.len() * tasks_per_worker);
        (OutputBuffers::new(Some(home), [self.shape], size), ReduceSlices(count), count)
    }

    unsafe fn make(&self, slices: &ReduceSlices, index: usize, to: &OutputPtrs) {
        let range = chunk(self.shape.num_elements(), slices.0, index);
        // SAFETY: the caller guarantees it; the operands have as many elements as the result.
        unsafe { reduce_flat(self.terms, range, self.op, to.start(0)) }
    }

    unsafe fn finish(&self, targets: OutputBuffers) -> Vec<FlexTensor> {
        // SAFETY: the caller guarantees it.
        unsafe { targets.finish([self.shape], dtype_of(self.terms)).collect() }
    }
}
