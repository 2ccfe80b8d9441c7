//! Kernels of the collectives that move elements: all-gather, all-to-all, broadcast and scatter.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
use itertools::Itertools;

use super::cooperative::{CooperativeResult, Owner, PartitionedJob};
use super::wrap;
use crate::comm::CollectivePlan;
use crate::comm::backend::ranges::Ranges;
use crate::kernels::flex::{CopyTasks, OutputBuffers, OutputPtrs, Sources, run};
use crate::kernels::{CopyPlan, FlatLayout};
use crate::memory::{HostMemoryPool, HostTuning};

/// Copies of an all-gather, one for all tensors of a dtype. Kept with its [`CollectivePlan`].
#[derive(Debug)]
pub(in crate::comm) struct GatherCopyPlan(Box<[DTypeCopies]>);

/// The tensors of one dtype in an all-gather.
#[derive(Debug)]
struct DTypeCopies {
    dtype: DType,
    /// Indices of these tensors.
    indices: Box<[usize]>,
    copies: CopyPlan,
    /// Number of bytes of the full tensors.
    bytes: usize,
}

impl GatherCopyPlan {
    /// Creates the copies of a planned all-gather over `ranks` ranks. The order does not depend on
    /// the rank that creates them.
    pub fn new(plan: &CollectivePlan, ranks: usize) -> Self {
        let copies_of = |dtype: DType| {
            let tensors = plan
                .sharded_tensors()
                .enumerate()
                .filter(|(_, (of, _))| *of == dtype);
            let (indices, tensors): (Vec<_>, _) =
                tensors.map(|(index, (_, tensor))| (index, tensor)).unzip();
            let copies = FlatLayout::new(ranks, tensors, 1).join_parts();
            DTypeCopies {
                dtype,
                indices: indices.into(),
                bytes: copies.copied() * dtype.size(),
                copies,
            }
        };
        Self(plan.dtypes().unique().map(copies_of).collect())
    }

    /// Returns the sources of the copies: `parts` are the shards by rank and tensor.
    pub fn sources(&self, parts: &[Vec<&FlexTensor>]) -> GatherSources {
        let of_dtype_copies = |copies_of: &DTypeCopies| {
            let of_dtype = parts
                .iter()
                .flat_map(|parts| copies_of.indices.iter().map(|index| parts[*index]));
            (Sources::of(of_dtype), CooperativeResult::default())
        };
        GatherSources {
            ranks: parts.len(),
            copies: self.0.iter().map(of_dtype_copies).collect(),
        }
    }

    /// Returns the full tensors. Large ones are built by all local ranks together and shared, if
    /// they have an `owner`.
    pub fn full_tensors(
        &self,
        gathered: &GatherSources,
        owner: Option<Owner>,
    ) -> Vec<DispatchTensor> {
        let mut full_tensors =
            Vec::with_capacity(self.0.iter().map(|copies_of| copies_of.indices.len()).sum());
        for (copies_of, (sources, together)) in self.0.iter().zip(&gathered.copies) {
            let ranks = gathered.ranks;
            let of_dtype_copies =
                match owner.filter(|_| copies_of.bytes * ranks >= HostTuning::get().shared_bytes) {
                    // SAFETY: all ranks have the shards of the same collective, and the copies of
                    // the same plan.
                    Some(owner) => unsafe {
                        together.get(
                            &JoinShards {
                                copies_of,
                                sources,
                                ranks,
                            },
                            owner,
                        )
                    },
                    None => run(&copies_of.copies, sources),
                };
            full_tensors.extend(copies_of.indices.iter().zip(of_dtype_copies));
        }
        full_tensors.sort_unstable_by_key(|(index, _)| **index);
        full_tensors
            .into_iter()
            .map(|(_, full)| wrap(full))
            .collect()
    }
}

/// Shards of all ranks, for each dtype of the [`GatherCopyPlan`], and the shared results.
#[derive(Debug)]
pub(in crate::comm) struct GatherSources {
    ranks: usize,
    copies: Box<[(Sources, CooperativeResult<CopyTasks>)]>,
}

/// Job that joins the shards of all ranks to full tensors.
struct JoinShards<'a> {
    copies_of: &'a DTypeCopies,
    sources: &'a Sources,
    ranks: usize,
}

// SAFETY: the tasks are from one copy, which writes every element of its targets once.
unsafe impl PartitionedJob for JoinShards<'_> {
    type Partition = CopyTasks;

    fn begin(&self, home: &Arc<HostMemoryPool>) -> (OutputBuffers, CopyTasks, usize) {
        let copies = &self.copies_of.copies;
        let size = self.copies_of.dtype.size();
        let blocks = CopyTasks::new(
            copies,
            self.sources,
            size,
            self.ranks * HostTuning::get().tasks_per_worker,
        );
        let count = blocks.count();
        (OutputBuffers::of(Some(home), copies, size), blocks, count)
    }

    unsafe fn make(&self, blocks: &CopyTasks, index: usize, to: &OutputPtrs) {
        // SAFETY: the caller guarantees it.
        unsafe { blocks.copy(index, &self.copies_of.copies, self.sources, to) }
    }

    unsafe fn finish(&self, targets: OutputBuffers) -> Vec<FlexTensor> {
        // SAFETY: the caller guarantees it.
        unsafe {
            targets
                .finish(self.copies_of.copies.targets(), self.copies_of.dtype)
                .collect()
        }
    }
}

/// Concatenates the blocks of `sources` along `dim`.
///
/// All sources have the same dtype, and the same shape except for `dim`. There is at least one.
pub(crate) fn concat(sources: &[(&FlexTensor, Ranges)], dim: usize) -> DispatchTensor {
    let blocks = sources
        .iter()
        .map(|(tensor, ranges)| (tensor.layout().shape().clone(), &ranges[..]))
        .collect_vec();
    let tensors = Sources::of(sources.iter().map(|(tensor, _)| *tensor));
    let mut copy = run(&CopyPlan::concat(&blocks, dim), &tensors);
    wrap(copy.pop().expect("one target"))
}
