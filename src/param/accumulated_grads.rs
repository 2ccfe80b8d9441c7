//! [`AccumulatedGrads`]: gradients of backwards that were not to reduce them, or not over all ranks.
//!
//! ```text
//!   backward   whole gradients ── no sync ──────> whole      (this rank's sum)
//!                    │ + whole
//!              reduce-scatter ── no all-reduce ─> scattered  (this rank's shard of the sum over the ranks that shard)
//!                    │ + scattered
//!              all-reduce over replicas ────────> the optimizer
//! ```
//!
//! The next backward that reduces the unit takes them along. One that does not enter the unit, and reduces others of its model,
//! [reduces them at its end](super::unit_pass::BackwardScheduler::reduce_waiting).

use std::collections::HashMap;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor};
use parking_lot::Mutex;

/// Gradients that wait, by the leaf that they are for: an optimizer step makes new leaves.
#[derive(Debug, Default)]
pub(super) struct AccumulatedGrads(Mutex<ByStage>);

#[derive(Debug, Default)]
struct ByStage {
    full: GradsByLeaf,
    scattered: GradsByLeaf,
    /// True if the optimizer has stepped since, though they were to be reduced.
    has_missed_step: bool,
}

/// `None` of a leaf whose reduction was put off, without a gradient on this rank: so ranks have the same leaves.
type GradsByLeaf = HashMap<NodeId, Option<DispatchTensor>>;

/// How far a gradient has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GradStage {
    /// Not reduced.
    Full,
    /// Reduced over the ranks that shard.
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
    /// Puts off the reduction of gradients of these leaves: adds them to those that wait.
    pub(super) fn add(&self, stage: GradStage, leaves: &[NodeId], grads: Vec<Option<DispatchTensor>>) {
        let mut waiting = self.0.lock();
        let waiting = waiting.stage(stage);
        for (&leaf, grad) in leaves.iter().zip(grads) {
            let before = waiting.remove(&leaf).flatten();
            waiting.insert(leaf, sum(before, grad));
        }
    }

    /// Adds to gradients of these leaves what has waited for each; returns whether anything has.
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

    /// Returns true if the reduction of one of these leaves was put off.
    pub(super) fn has(&self, stage: GradStage, leaves: &[NodeId]) -> bool {
        let mut waiting = self.0.lock();
        let waiting = waiting.stage(stage);
        leaves.iter().any(|leaf| waiting.contains_key(leaf))
    }

    /// Returns true if a reduction was put off.
    pub(super) fn is_any(&self) -> bool {
        !self.0.lock().is_empty()
    }

    /// The optimizer steps without them, though they were to be reduced.
    pub(super) fn miss_step(&self) {
        self.0.lock().has_missed_step = true;
    }

    /// Returns true if a step has missed one, or if one waits for a leaf that is none of these.
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
