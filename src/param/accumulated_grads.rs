//! [`AccumulatedGrads`]: gradients of backwards that did not reduce them, or reduced them only over the ranks that
//! shard (gradient accumulation).
//!
//! ```text
//!   backward   full gradients ─── no sync ──────> full       (this rank's sum)
//!                    │ + full
//!              reduce-scatter ── no all-reduce ─> scattered  (this rank's shard of the sum over the ranks that shard)
//!                    │ + scattered
//!              all-reduce over replicas ────────> the optimizer
//! ```
//!
//! The next backward that reduces the unit includes them. A backward that does not enter the unit, but reduces other
//! units of its model, [reduces them at its end](super::unit_pass::BackwardScheduler::reduce_waiting).

use std::collections::HashMap;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor};
use parking_lot::Mutex;

/// Accumulated gradients of a unit, by the autodiff leaf of their parameter. An optimizer step replaces the leaves.
#[derive(Debug, Default)]
pub(super) struct AccumulatedGrads(Mutex<ByStage>);

#[derive(Debug, Default)]
struct ByStage {
    full: GradsByLeaf,
    scattered: GradsByLeaf,
    /// True if the optimizer stepped without these gradients although they should have been reduced before.
    has_missed_step: bool,
}

/// Gradients by leaf. A leaf whose reduction was postponed, although this rank has no gradient for it, maps to
/// `None`, so that all ranks have the same leaves.
type GradsByLeaf = HashMap<NodeId, Option<DispatchTensor>>;

/// Progress of a gradient's reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GradStage {
    /// The gradient is not reduced.
    Full,
    /// The gradient is reduced over the ranks that shard.
    Scattered,
}

impl ByStage {
    fn stage(&mut self, stage: GradStage) -> &mut GradsByLeaf {
        match stage {
            GradStage::Full => &mut self.full,
            GradStage::Scattered => &mut self.scattered,
        }
    }

    fn is_empty(&self) -> bool {
        self.full.is_empty() && self.scattered.is_empty()
    }
}

impl AccumulatedGrads {
    /// Postpones the reduction of the gradients of these leaves, and adds them to the accumulated ones.
    pub(super) fn add(&self, stage: GradStage, leaves: &[NodeId], grads: Vec<Option<DispatchTensor>>) {
        let mut waiting = self.0.lock();
        let waiting = waiting.stage(stage);
        for (&leaf, grad) in leaves.iter().zip(grads) {
            let before = waiting.remove(&leaf).flatten();
            waiting.insert(leaf, sum(before, grad));
        }
    }

    /// Removes the accumulated gradients of these leaves, and adds them to `grads`. Returns, per leaf, true if there
    /// was one.
    pub(super) fn take(&self, stage: GradStage, leaves: &[NodeId], grads: &mut [Option<DispatchTensor>]) -> Vec<bool> {
        let mut waiting = self.0.lock();
        let of_stage = waiting.stage(stage);
        let add = |(leaf, grad): (&NodeId, &mut Option<DispatchTensor>)| {
            let before = of_stage.remove(leaf).flatten();
            let has_waited = before.is_some();
            *grad = sum(before, grad.take());
            has_waited
        };
        let have_waited = leaves.iter().zip(grads).map(add).collect();
        waiting.has_missed_step &= !waiting.is_empty();
        have_waited
    }

    /// Returns true if the reduction of one of these leaves was postponed.
    pub(super) fn has(&self, stage: GradStage, leaves: &[NodeId]) -> bool {
        let mut waiting = self.0.lock();
        let waiting = waiting.stage(stage);
        leaves.iter().any(|leaf| waiting.contains_key(leaf))
    }

    /// Returns true if any reduction was postponed.
    pub(super) fn is_any(&self) -> bool {
        !self.0.lock().is_empty()
    }

    /// Records that the optimizer steps without these gradients although they should have been reduced before.
    pub(super) fn miss_step(&self) {
        self.0.lock().has_missed_step = true;
    }

    /// Returns true if the gradients can no longer be used: a step was taken without them, or one is for a leaf for
    /// which `leaves` returns false.
    pub(super) fn is_too_late(&self, leaves: impl Fn(&NodeId) -> bool) -> bool {
        let waiting = self.0.lock();
        waiting.has_missed_step || waiting.full.keys().chain(waiting.scattered.keys()).any(|leaf| !leaves(leaf))
    }

    pub(super) fn clear(&self) {
        *self.0.lock() = ByStage::default();
    }
}

fn sum(a: Option<DispatchTensor>, b: Option<DispatchTensor>) -> Option<DispatchTensor> {
    match (a, b) {
        (Some(a), Some(b)) => Some(Dispatch::float_add(a, b)),
        (a, b) => a.or(b),
    }
}
