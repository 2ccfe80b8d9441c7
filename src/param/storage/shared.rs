//! [`SharedWeights`]: gathered weights shared by several passes from the same shards.

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::gathered::StoredWeight;
use super::placing::persistent_copy;
use super::slots::{Refill, Storage};

/// Weights of unfinished passes, shared with passes that begin before those end.
///
/// The unit holds this object, so it must not hold a pass, which holds the unit. A pass registers itself in
/// `freed_by` only when it frees the storage, and the unit then drops this object.
#[derive(Debug, Clone)]
pub(in super::super) struct SharedWeights {
    pub(super) weights: Vec<StoredWeight<dyn Storage, DispatchTensor>>,
    pub(super) freed_by: Arc<FreedBy>,
}

impl SharedWeights {
    /// Returns the weights in persistent memory.
    pub(super) fn lasting(&self) -> Vec<DispatchTensor> {
        self.weights.iter().map(|weight| persistent_copy(weight.value().clone())).collect()
    }
}

/// Passes that evicted shared storage. Each of them can restore it.
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
