//! [`PlanCache`]: what a unit's collectives do step after step, planned once.

use std::sync::Arc;

use burn::tensor::DType;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::comm::CollectivePlan;

/// A collective of a unit, on tensors of some of its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnitCollectiveKind {
    /// All-gather of the shards of those that are cut.
    Shards,
    /// All-gather of the parts that neighbours keep of them.
    Parts,
    /// Reduce-scatter of their gradients, with a row of flags for each rank.
    Gradients,
    /// All-reduce of gradients of replicated parameters, with flags.
    ReplicatedGradients,
    /// All-reduce of what this rank has of the gradients of all, and flags.
    All,
}

/// The plans that were made.
#[derive(Debug, Default)]
pub(super) struct PlanCache(Mutex<SmallVec<[CachedPlan; 3]>>);

/// The plan of a collective of some parameters.
#[derive(Debug, Clone)]
pub(super) struct CachedPlan {
    pub exchange: UnitCollectiveKind,
    pub members: Arc<[usize]>,
    /// Of the parameters whose tensors travel.
    pub names: Arc<[Arc<str>]>,
    pub plan: Arc<CollectivePlan>,
}

/// How many a unit remembers: a step has five at most, of one set of parameters.
const MAX_PLANS: usize = 16;

impl PlanCache {
    /// The plan for tensors of these dtypes, if it was made.
    pub fn find(
        &self,
        exchange: UnitCollectiveKind,
        members: &[usize],
        dtypes: impl Iterator<Item = DType> + Clone,
    ) -> Option<CachedPlan> {
        let is_this = |known: &&CachedPlan| {
            known.exchange == exchange && *known.members == *members && known.plan.dtypes().eq(dtypes.clone())
        };
        self.0.lock().iter().find(is_this).cloned()
    }

    /// They are made anew.
    pub fn forget(&self) {
        self.0.lock().clear();
    }

    pub fn keep(&self, known: CachedPlan) {
        let mut plans = self.0.lock();
        if plans.len() == MAX_PLANS {
            plans.clear();
        }
        plans.push(known);
    }
}
