//! [`Bucket`]: consecutive units whose gradients one all-reduce sums (data parallelism).
//!
//! ```text
//!   reduced      head   block 3   block 2   block 1   block 0   embedding
//!   buckets     └ 1 MiB ┘ └────── 25 MiB ─────────┘ └── end of backward ──┘
//! ```
//!
//! A bucket is posted once it has its number of bytes, and waited for when the next one is posted.
//! Its units follow from the order in which units are reduced and from the sizes of their
//! parameters, so they are the same on all ranks. A unit is never divided.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};

use super::buckets::{BucketPart, Buckets};
use super::stages::{GradReduction, PreparedReduction};
use crate::autodiff::BackwardId;
use crate::comm::{Call, ReduceOp, ShardedModel, TensorMeta, Work};
use crate::error::OrUnwind;
use crate::param::gradient_hook::{GradientHook, GradsWork};

/// Gradients of consecutive units that wait for their all-reduce.
#[derive(Debug)]
pub(super) struct Bucket {
    pub(super) backward: BackwardId,
    buckets: Arc<Buckets>,
    op: ReduceOp,
    hook: Option<Arc<dyn GradientHook>>,
    /// Number of bytes with which it is full.
    size: usize,
    bytes: usize,
    reductions: Vec<PreparedReduction>,
}

impl Bucket {
    /// Begins a bucket with its first reduction. `is_first` is true for the first bucket of the
    /// backward.
    pub(super) fn new(
        backward: BackwardId,
        buckets: &Arc<Buckets>,
        first: PreparedReduction,
        is_first: bool,
    ) -> Self {
        let mut bucket = Self {
            backward,
            op: first.op(),
            hook: first.hook(),
            size: buckets.sizes()[usize::from(!is_first)],
            buckets: buckets.clone(),
            bytes: 0,
            reductions: Vec::new(),
        };
        bucket.add(first);
        bucket
    }

    /// Returns true if a reduction of the same backward with these buckets can be added.
    pub(super) fn takes(&self, buckets: &Arc<Buckets>, reduction: &PreparedReduction) -> bool {
        let address = |hook: &Option<Arc<dyn GradientHook>>| {
            hook.as_ref().map(|hook| Arc::as_ptr(hook).addr())
        };
        self.op == reduction.op()
            && Arc::ptr_eq(&self.buckets, buckets)
            && address(&self.hook) == address(&reduction.hook())
    }

    pub(super) fn add(&mut self, reduction: PreparedReduction) {
        self.bytes += reduction.bytes();
        self.reductions.push(reduction);
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes >= self.size
    }

    /// Posts the all-reduce. Returns the reductions, which share it.
    ///
    /// # Collective
    /// On all data-parallel ranks of the units.
    pub(super) fn post(self) -> Vec<GradReduction> {
        let Self { reductions, .. } = &self;
        if reductions.len() == 1 {
            return self
                .reductions
                .into_iter()
                .map(PreparedReduction::post)
                .collect();
        }
        let grads: Vec<_> = reductions.iter().map(PreparedReduction::grads).collect();
        let flags: Vec<_> = reductions.iter().map(PreparedReduction::flags).collect();
        let lens: Vec<_> = grads.iter().map(Vec::len).collect();
        let work = self.all_reduce(grads.into_iter().flatten().collect(), flags);
        let parts = BucketPart::divide(work, &lens);
        self.reductions
            .into_iter()
            .zip(parts)
            .map(|(prepared, part)| prepared.post_in(part))
            .collect()
    }

    /// Starts the all-reduce of the gradients of all units, followed by their flags.
    ///
    /// # Collective
    /// On all data-parallel ranks of the units.
    ///
    /// # Panics
    /// Unwinds with the error of the hook.
    fn all_reduce(&self, grads: Vec<DispatchTensor>, flags: Vec<DispatchTensor>) -> GradsWork {
        let Self { op, reductions, .. } = self;
        let data = reductions[0].unit().spec().sharded_data();
        let joined = joined(reductions.iter().map(PreparedReduction::call));
        let names = reductions.iter().flat_map(PreparedReduction::names);
        let compared = reductions.iter().flat_map(PreparedReduction::compared);
        let call = Call {
            model: joined.model.clone().map(|model| ShardedModel {
                number: data.model.shard,
                ..model
            }),
            ..joined.with_names(names).with_digests(compared.collect())
        };
        if let Some(hook) = &self.hook {
            return GradsWork::hooked(&**hook, &data.reduce, call, *op, grads, flags).or_unwind();
        }
        let tensors: Vec<_> = grads.into_iter().chain(flags).collect();
        let key = (
            reductions.iter().map(PreparedReduction::key).collect(),
            tensors.iter().map(DispatchTensor::dtype).collect(),
            *op,
        );
        let metas = tensors.iter().map(|tensor| TensorMeta {
            shape: tensor.shape(),
            dtype: tensor.dtype(),
        });
        let metas: Vec<_> = metas.collect();
        let plan = self
            .buckets
            .plan(key, |op| data.reduce.plan_all_reduce(&metas, op));
        let work = match plan {
            Ok(plan) => data.reduce.execute_plan(call, &plan, tensors),
            Err(error) => Work::failed(error),
        };
        work.into()
    }
}

/// Returns the call of an all-reduce that units share.
fn joined(mut calls: impl Iterator<Item = Call>) -> Call {
    let mut all = calls.next().expect("a bucket has units");
    let (mut count, mut last) = (0, all.label.clone());
    let mut states = Vec::new();
    if let Some(model) = &all.model {
        states.extend_from_slice(&model.states);
    }
    for call in calls {
        (count, last) = (count + 1, call.label);
        states.extend(call.model.iter().flat_map(|model| model.states.iter()));
    }
    states.dedup();
    all.label = match count {
        1 => format!("{}, {last}", all.label).into(),
        _ => format!("{}..{last}", all.label).into(),
    };
    all.model = all.model.map(|model| ShardedModel {
        states: states.into(),
        ..model
    });
    all
}
