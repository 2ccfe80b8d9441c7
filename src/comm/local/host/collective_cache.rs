//! [`CollectiveCache`]: what every rank needs of a collective alike, made by whichever comes first.
//!
//! That is where the elements of every rank's tensors are, and which go where. Were each rank to find it out by
//! itself, that would be work that grows with the square of their number, whatever the size of the tensors.

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
use super::result_cache::{CachedResults, Owner, ResultRetention, SharedResultCache};
use super::{primitive, wrap};
use crate::comm::ReduceOp;
use crate::comm::backend::ranges::{Ranges, full};
use crate::comm::plan::offered;
use crate::kernels::flex::{Ends, OutputBuffers, PinnedSources, Sources, stream};
use crate::memory::HostMemoryPool;
use crate::placement::chunk;

/// A part of the first member's deposit.
#[derive(Debug, Default)]
pub(in crate::comm::local) struct CollectiveCache {
    parts: OnceLock<Option<GatherSources>>,
    /// Of each tensor.
    terms: OnceLock<Box<[OnceLock<Option<ReduceOperands>>]>>,
    /// Of results in common.
    bag: OnceLock<Arc<CachedResults>>,
}

impl CollectiveCache {
    /// Where results in common of the collective of `ticket` belong, whose rank has `waited` for others.
    pub fn owner<'a>(
        &'a self,
        shelf: &'a SharedResultCache,
        ticket: OpHandle,
        keep: ResultRetention,
        waited: &'a Cell<Duration>,
    ) -> Owner<'a> {
        Owner { shelf, ticket, bag: self.bag.get_or_init(Arc::default), keep, waited }
    }

    /// The parts that an all-gather joins, by rank and tensor; `None` if they are not all Flex tensors.
    pub fn gathered<'a>(
        &self,
        joints: &GatherCopyPlan,
        parts: impl FnOnce() -> Option<Vec<Vec<&'a FlexTensor>>>,
    ) -> Option<&GatherSources> {
        offered(&self.parts, || Some(joints.sources(&parts()?))).as_ref()
    }

    /// The terms of the reduction of tensor `index` of `count`; `None` if they are not all Flex tensors.
    pub fn terms<'a>(
        &self,
        (index, count): (usize, usize),
        terms: impl FnOnce() -> Option<SmallVec<[&'a FlexTensor; 8]>>,
    ) -> Option<&ReduceOperands> {
        let all = offered(&self.terms, || (0..count).map(|_| OnceLock::new()).collect());
        offered(&all[index], || Some(ReduceOperands::new(&terms()?))).as_ref()
    }
}

/// Tensors of one shape and dtype, one of each rank, which are reduced.
#[derive(Debug)]
pub(in crate::comm::local) struct ReduceOperands {
    terms: PinnedSources,
    shape: Shape,
    full: CooperativeResult<ReduceSlices>,
}

impl ReduceOperands {
    /// `None` if they are not all Flex tensors.
    pub fn of(terms: &[DispatchTensor]) -> Option<Self> {
        let terms: Option<SmallVec<[_; 8]>> = terms.iter().map(primitive).collect();
        Some(Self::new(&terms?))
    }

    fn new(terms: &[&FlexTensor]) -> Self {
        let shape = terms[0].layout().shape().clone();
        Self { terms: PinnedSources::of(terms), shape, full: CooperativeResult::default() }
    }

    /// The block `ranges` of every term, reduced.
    pub fn reduce(&self, ranges: &Ranges, op: ReduceOp) -> DispatchTensor {
        wrap(reduce(&self.terms.get(), &self.shape, ranges, op))
    }

    /// All of every term, reduced, from `to` on; past the caches where what is there has so many `bytes` in all.
    ///
    /// # Safety
    /// There is room for a term, aligned, and nobody else reads or writes there.
    pub unsafe fn reduce_into(&self, op: ReduceOp, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's.
        unsafe { reduce_flat(&self.terms.get(), 0..self.shape.num_elements(), op, to, stream::pays(bytes)) }
    }

    /// The reduction, whole; a large one is in common, where it has an `owner`.
    pub fn reduce_full(&self, op: ReduceOp, owner: Option<Owner>) -> DispatchTensor {
        let (terms, elements) = (self.terms.get(), self.shape.num_elements());
        match owner.filter(|_| elements * dtype_of(&terms).size() * terms.len() >= WORTH) {
            Some(owner) => {
                // SAFETY: all ranks have the terms of one collective, and agree on the operation.
                let mut complete = unsafe { self.full.get(&ReduceJob { terms, shape: &self.shape, op }, owner) };
                wrap(complete.pop().expect("one whole"))
            }
            None => self.reduce(&full(&self.shape[..]), op),
        }
    }
}

/// How a reduction is cut: into slices of nearly equal length, which are past the caches if it streams.
#[derive(Debug)]
struct ReduceSlices {
    count: usize,
    streams: bool,
}

/// The least bytes that are read for a slice, and that it has.
const READ: usize = 512 << 10;
const WRITTEN: usize = 16 << 10;

/// Terms that are reduced to a whole.
struct ReduceJob<'a> {
    terms: Sources<'a>,
    shape: &'a Shape,
    op: ReduceOp,
}

// SAFETY: slices of the elements, one after another.
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
        // SAFETY: the caller's; the terms have as many elements as the whole.
        unsafe { reduce_flat(&self.terms, range, self.op, to.start(0), slices.streams) }
    }

    unsafe fn finish(&self, targets: OutputBuffers) -> Vec<FlexTensor> {
        // SAFETY: the caller's.
        unsafe { targets.finish([self.shape], dtype_of(&self.terms)).collect() }
    }
}
