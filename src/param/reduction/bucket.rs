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

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::DType;
use lru::LruCache;
use parking_lot::Mutex;

use super::stages::{GradReduction, PreparedReduction};
use crate::autodiff::BackwardId;
use crate::comm::{
    Call, CollectivePlan, CommError, OpTiming, ReduceOp, ShardedModel, TensorMeta, Work,
};
use crate::error::OrUnwind;
use crate::param::gradient_hook::{GradientHook, GradsWork};

/// The buckets of a model's units: their sizes, and the plans of their all-reduces.
#[derive(Debug)]
pub(crate) struct Buckets {
    /// Bytes of the first bucket of a backward, and of the others.
    sizes: [usize; 2],
    plans: Mutex<LruCache<PlanKey, Arc<CollectivePlan>>>,
}

/// Units of a bucket by their addresses, each with its trained parameters; dtypes of the tensors;
/// the operation.
type PlanKey = (Vec<(usize, Vec<usize>)>, Vec<DType>, ReduceOp);

/// Most plans that are kept.
const MAX_PLANNED: NonZeroUsize = NonZeroUsize::new(64).unwrap();

impl Buckets {
    /// Creates buckets with a number of bytes for the first of a backward, and one for the others.
    pub(crate) fn new(sizes: [usize; 2]) -> Arc<Self> {
        Arc::new(Self {
            sizes,
            plans: Mutex::new(LruCache::new(MAX_PLANNED)),
        })
    }

    pub(crate) fn sizes(&self) -> [usize; 2] {
        self.sizes
    }

    fn plan(
        &self,
        key: PlanKey,
        make: impl FnOnce(ReduceOp) -> Result<Arc<CollectivePlan>, CommError>,
    ) -> Result<Arc<CollectivePlan>, CommError> {
        let op = key.2;
        let mut plans = self.plans.lock();
        plans.try_get_or_insert(key, || make(op)).cloned()
    }
}

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
            size: buckets.sizes[usize::from(!is_first)],
            buckets: buckets.clone(),
            bytes: 0,
            reductions: Vec::new(),
        };
        bucket.add(first);
        bucket
    }

    /// Returns true if a reduction of this backward with these buckets can be added.
    pub(super) fn takes(
        &self,
        backward: BackwardId,
        buckets: &Arc<Buckets>,
        reduction: &PreparedReduction,
    ) -> bool {
        let address = |hook: &Option<Arc<dyn GradientHook>>| {
            hook.as_ref().map(|hook| Arc::as_ptr(hook).addr())
        };
        (self.backward, self.op) == (backward, reduction.op())
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
        let all = lens.iter().sum::<usize>();
        let work = self.all_reduce(grads.into_iter().flatten().collect(), flags);
        let shared = Arc::new(Mutex::new(SharedWork {
            in_flight: Some(work),
            reduced: Ok(Vec::new()),
        }));
        let mut begin = 0;
        let parts = lens.into_iter().enumerate().map(|(at, len)| {
            let grads = begin..begin + len;
            begin += len;
            BucketPart {
                shared: shared.clone(),
                grads,
                flags: all + at,
            }
        });
        let parts: Vec<_> = parts.collect();
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

/// The part of a unit in the all-reduce of its bucket.
#[derive(Debug)]
pub(super) struct BucketPart {
    shared: Arc<Mutex<SharedWork>>,
    /// Indices of its gradients among the tensors, and of its flags.
    grads: Range<usize>,
    flags: usize,
}

/// The all-reduce of a bucket.
#[derive(Debug)]
struct SharedWork {
    in_flight: Option<GradsWork>,
    /// The tensors that no part has taken, once the all-reduce is complete.
    reduced: Result<Vec<Option<DispatchTensor>>, CommError>,
}

impl BucketPart {
    /// Waits for the all-reduce, and returns the unit's gradients and its flags. The first part has
    /// the timing.
    pub(super) fn wait_with_timing(
        self,
    ) -> Result<(Vec<DispatchTensor>, Option<OpTiming>), CommError> {
        let mut shared = self.shared.lock();
        let mut timing = None;
        if let Some(work) = shared.in_flight.take() {
            shared.reduced = work.wait_with_timing().map(|(tensors, of_work)| {
                timing = of_work;
                tensors.into_iter().map(Some).collect()
            });
        }
        let tensors = shared.reduced.as_mut().map_err(|error| error.clone())?;
        let own = self.grads.chain([self.flags]);
        let own = own.map(|at| tensors[at].take().expect("a part is waited for once"));
        Ok((own.collect(), timing))
    }
}
