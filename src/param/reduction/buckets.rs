//! [`Buckets`]: sizes and plans of the buckets of a model, and the [part](BucketPart) of a unit in one.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::backend::DispatchTensor;
use burn::tensor::DType;
use lru::LruCache;
use parking_lot::Mutex;

use crate::Result;
use crate::comm::{CollectivePlan, CommError, OpTiming, ReduceOp};
use crate::param::gradient_hook::GradsWork;

/// The buckets of a model's units: their sizes, and the plans of their all-reduces.
#[derive(Debug)]
pub(crate) struct Buckets {
    /// Bytes of the first bucket of a backward, and of the others.
    sizes: [usize; 2],
    plans: Mutex<LruCache<PlanKey, Arc<CollectivePlan>>>,
    /// Those of the units that take the place of these on another mesh.
    successor: OnceLock<Arc<Self>>,
}

/// Units of a bucket by their addresses, each with its trained parameters; dtypes of the tensors;
/// the operation.
pub(super) type PlanKey = (Vec<(usize, Vec<usize>)>, Vec<DType>, ReduceOp);

/// Most plans that are kept.
const MAX_PLANNED: NonZeroUsize = NonZeroUsize::new(64).unwrap();

impl Buckets {
    /// Creates buckets with a number of bytes for the first of a backward, and one for the others.
    pub(crate) fn new(sizes: [usize; 2]) -> Arc<Self> {
        Arc::new(Self {
            sizes,
            plans: Mutex::new(LruCache::new(MAX_PLANNED)),
            successor: OnceLock::new(),
        })
    }

    /// Returns the buckets of the same units on another mesh, which all of them share.
    pub(crate) fn successor(&self) -> Arc<Self> {
        let new = || Self::new(self.sizes);
        self.successor.get_or_init(new).clone()
    }

    pub(crate) fn sizes(&self) -> [usize; 2] {
        self.sizes
    }

    pub(super) fn plan(
        &self,
        key: PlanKey,
        make: impl FnOnce(ReduceOp) -> Result<Arc<CollectivePlan>, CommError>,
    ) -> Result<Arc<CollectivePlan>, CommError> {
        let op = key.2;
        let mut plans = self.plans.lock();
        plans.try_get_or_insert(key, || make(op)).cloned()
    }
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
    reduced: Result<Vec<Option<DispatchTensor>>>,
}

impl BucketPart {
    /// Divides the all-reduce of a bucket whose units have these numbers of gradients, in their
    /// order; the flags of all units follow.
    pub(super) fn divide(work: GradsWork, lens: &[usize]) -> Vec<Self> {
        let all = lens.iter().sum::<usize>();
        let shared = Arc::new(Mutex::new(SharedWork {
            in_flight: Some(work),
            reduced: Ok(Vec::new()),
        }));
        let mut begin = 0;
        let part = |(at, &len): (usize, &usize)| {
            let grads = begin..begin + len;
            begin += len;
            Self {
                shared: shared.clone(),
                grads,
                flags: all + at,
            }
        };
        lens.iter().enumerate().map(part).collect()
    }

    /// Waits for the all-reduce, and returns the unit's gradients and its flags. The first part has
    /// the timing.
    pub(super) fn wait_with_timing(self) -> Result<(Vec<DispatchTensor>, Option<OpTiming>)> {
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
