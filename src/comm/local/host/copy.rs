//! Collectives that move elements: all-gather, all-to-all, broadcast and scatter.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
use itertools::Itertools;

use super::cooperative::{self, CooperativeResult, PartitionedJob, WORTH};
use super::result_cache::Owner;
use super::wrap;
use crate::comm::CollectivePlan;
use crate::comm::backend::ranges::Ranges;
use crate::kernels::flex::{CopyTasks, Ends, OutputBuffers, PinnedSources, Sources, run};
use crate::kernels::{Convert, CopyPlan, FlatLayout};
use crate::memory::HostMemoryPool;

/// Destinations of an all-gather's elements: one copy for all tensors of a dtype. Kept with its [`CollectivePlan`].
#[derive(Debug)]
pub(in crate::comm::local) struct GatherCopyPlan(Box<[Joint]>);

/// The part of an all-gather that is about the tensors of one dtype.
#[derive(Debug)]
struct Joint {
    dtype: DType,
    /// Which tensors these are.
    indices: Box<[usize]>,
    copies: CopyPlan,
    /// Of the wholes.
    bytes: usize,
}

impl GatherCopyPlan {
    /// Of what is planned, over `ranks` ranks: in one order, whoever makes it.
    pub fn new(plan: &CollectivePlan, ranks: usize) -> Self {
        let joint = |dtype: DType| {
            let tensors = plan.sharded_tensors().enumerate().filter(|(_, (of, _))| *of == dtype);
            let (indices, tensors): (Vec<_>, _) = tensors.map(|(index, (_, tensor))| (index, tensor)).unzip();
            let copies = FlatLayout::new(ranks, tensors, 1).join_parts();
            Joint { dtype, indices: indices.into(), bytes: copies.copied() * dtype.size(), copies }
        };
        Self(plan.dtypes().unique().map(joint).collect())
    }

    /// Where the parts are that are joined: `parts` by rank and tensor.
    pub fn sources(&self, parts: &[Vec<&FlexTensor>]) -> GatherSources {
        let of_joint = |joint: &Joint| {
            let of_dtype = parts.iter().flat_map(|parts| joint.indices.iter().map(|index| parts[*index]));
            (PinnedSources::of(&of_dtype.collect_vec()), CooperativeResult::default())
        };
        GatherSources { ranks: parts.len(), joints: self.0.iter().map(of_joint).collect() }
    }

    /// The wholes; large ones are in common, where they have an `owner`.
    pub fn full_tensors(&self, gathered: &GatherSources, owner: Option<Owner>) -> Vec<DispatchTensor> {
        let mut full_tensors = Vec::with_capacity(self.0.iter().map(|joint| joint.indices.len()).sum());
        for (joint, (parts, together)) in self.0.iter().zip(&gathered.joints) {
            let sources = parts.get();
            let ranks = gathered.ranks;
            let of_joint = match owner.filter(|_| joint.bytes * ranks >= WORTH) {
                // SAFETY: all ranks have the parts of one collective, and joints of one plan.
                Some(owner) => unsafe { together.get(&Join { joint, sources, ranks }, owner) },
                None => run(&joint.copies, &sources, Convert::to(joint.dtype)),
            };
            full_tensors.extend(joint.indices.iter().zip(of_joint));
        }
        full_tensors.sort_unstable_by_key(|(index, _)| **index);
        full_tensors.into_iter().map(|(_, full)| wrap(full)).collect()
    }
}

/// The parts of all ranks, for each of the [`GatherCopyPlan`], and the wholes.
#[derive(Debug)]
pub(in crate::comm::local) struct GatherSources {
    ranks: usize,
    joints: Box<[(PinnedSources, CooperativeResult<CopyTasks>)]>,
}

/// The parts of all ranks joined to wholes.
struct Join<'a> {
    joint: &'a Joint,
    sources: Sources<'a>,
    ranks: usize,
}

// SAFETY: pieces of one copy, which has every element of its targets once.
unsafe impl PartitionedJob for Join<'_> {
    type Partition = CopyTasks;

    fn begin(&self, home: &Arc<HostMemoryPool>) -> (OutputBuffers, CopyTasks, usize) {
        let (copies, size) = (&self.joint.copies, self.joint.dtype.size());
        let blocks = CopyTasks::new(copies, &self.sources, size, self.ranks * cooperative::PARTS_PER_RANK);
        let count = blocks.count();
        (OutputBuffers::of(Some(home), copies, size), blocks, count)
    }

    unsafe fn make(&self, blocks: &CopyTasks, index: usize, to: &Ends<u8>) {
        // SAFETY: the caller's.
        unsafe { blocks.copy(index, &self.joint.copies, &self.sources, to) }
    }

    unsafe fn finish(&self, targets: OutputBuffers) -> Vec<FlexTensor> {
        // SAFETY: the caller's.
        unsafe { targets.finish(self.joint.copies.targets(), self.joint.dtype).collect() }
    }
}

/// The blocks of `sources` one after another along `dim`.
///
/// All sources have one dtype, and one shape but for `dim`; there is at least one.
pub(crate) fn concat(sources: &[(&FlexTensor, Ranges)], dim: usize) -> DispatchTensor {
    let blocks = sources.iter().map(|(tensor, ranges)| (tensor.layout().shape().clone(), &ranges[..])).collect_vec();
    let tensors = Sources::of(sources.iter().map(|(tensor, _)| *tensor));
    let mut copy = run(&CopyPlan::concat(&blocks, dim), &tensors, Convert::to(sources[0].0.dtype()));
    wrap(copy.pop().expect("one target"))
}
