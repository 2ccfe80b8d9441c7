//! [`SharedWeights`]: gathered weights of several passes from the same shards.

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::gathered::StoredWeight;
use super::placing::persistent_copy;
use super::slots::{Refill, Storage};

/// The weights of passes that are not over, for those that begin meanwhile.
///
/// The unit holds them, so they hold no pass, which holds the unit: what fills their slots again is known once a pass had
/// to free them, and then the unit holds them no longer.
#[derive(Debug, Clone)]
pub(in super::super) struct SharedWeights {
    pub(super) weights: Vec<StoredWeight<dyn Storage, DispatchTensor>>,
    pub(super) freed_by: Arc<FreedBy>,
}

impl SharedWeights {
    /// The weights, in memory that lasts.
    pub(super) fn lasting(&self) -> Vec<DispatchTensor> {
        self.weights.iter().map(|weight| persistent_copy(weight.value().clone())).collect()
    }
}

/// Has slots filled by the passes that have freed them.
#[derive(Default)]
pub(super) struct FreedBy(Mutex<SmallVec<[Arc<dyn Refill>; 1]>>);

impl FreedBy {
    pub(super) fn add(&self, source: Arc<dyn Refill>) {
        self.0.lock().push(source);
    }
}

impl fmt::Debug for FreedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FreedBy").field(&self.0.lock().len()).finish()
    }
}

impl Refill for FreedBy {
    fn refill(&self) {
        let sources = self.0.lock().clone();
        sources.iter().for_each(|source| source.refill());
    }
}
