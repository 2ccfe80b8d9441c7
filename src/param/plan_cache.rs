//! [`PlanCache`]: cache of the plans of a unit's collectives, which are the same in every step.

use std::sync::Arc;

use burn::tensor::DType;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::comm::CollectivePlan;

/// Kind of a unit's collective on the tensors of some of its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnitCollectiveKind {
    /// All-gather of the shards of the sharded parameters.
    Shards,
    /// All-gather of the shards that the ranks of a post-forward group keep after forward.
    Parts,
    /// Reduce-scatter of the gradients of the sharded parameters, with a row of flags for each rank.
    Gradients,
    /// All-reduce of the gradients of replicated parameters, with flags.
    ReplicatedGradients,
    /// All-reduce of this rank's reduced gradients of all parameters over the replicas (HSDP), with flags.
    All,
}

/// The cached plans of a unit.
#[derive(Debug, Default)]
pub(super) struct PlanCache(Mutex<SmallVec<[CachedPlan; 3]>>);

/// The plan of one collective of some parameters.
#[derive(Debug, Clone)]
pub(super) struct CachedPlan {
    pub exchange: UnitCollectiveKind,
    pub members: Arc<[usize]>,
    /// Names of the parameters whose tensors the collective transfers.
    pub names: Arc<[Arc<str>]>,
    pub plan: Arc<CollectivePlan>,
}

/// Maximum number of plans in the cache of a unit. A step needs at most five for one set of parameters.
const MAX_PLANS: usize = 16;

impl PlanCache {
    /// Returns the cached plan of this collective for tensors of these dtypes, if there is one.
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

    /// Drops all plans, so that the next collectives make new ones.
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
