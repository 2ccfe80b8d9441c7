//! [`Waiting`]: gradients of backwards that were not to reduce them, or not over all ranks.
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
//! [reduces them at its end](super::pass::Passes::reduce_waiting).

use std::collections::HashMap;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor};
use parking_lot::Mutex;

use super::trained::Trained;

/// Gradients that wait, by the leaf that they are for: an optimizer step makes new leaves.
#[derive(Debug, Default)]
pub(super) struct Waiting(Mutex<ByStage>);

#[derive(Debug, Default)]
struct ByStage {
    whole: HashMap<NodeId, DispatchTensor>,
    scattered: HashMap<NodeId, DispatchTensor>,
    /// The reductions that were put off, oldest first. They are alike on all ranks: also on one without a gradient.
    put_off: Vec<(Stage, Trained)>,
    /// Whether the optimizer has stepped since, though they were to be reduced.
    has_missed_step: bool,
}

/// How far a gradient has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not reduced.
    Whole,
    /// Reduced over the ranks that shard.
    Scattered,
}

impl ByStage {
    fn stage(&mut self, stage: Stage) -> &mut HashMap<NodeId, DispatchTensor> {
        match stage {
            Stage::Whole => &mut self.whole,
            Stage::Scattered => &mut self.scattered,
        }
    }

    /// Gradients of these leaves are reduced with others.
    fn settle(&mut self, stage: Stage, leaves: &[NodeId]) {
        self.put_off.retain(|(of, trained)| *of != stage || trained.leaves.iter().any(|leaf| !leaves.contains(leaf)));
        self.has_missed_step &= !self.put_off.is_empty();
    }
}

impl Waiting {
    /// Puts off the reduction of these gradients: adds them to those that wait, of which `None` adds nothing.
    pub(super) fn add(&self, stage: Stage, trained: &Trained, grads: Vec<Option<DispatchTensor>>) {
        let mut waiting = self.0.lock();
        waiting.settle(stage, &trained.leaves);
        waiting.put_off.push((stage, trained.clone()));
        let waiting = waiting.stage(stage);
        for (&leaf, grad) in trained.leaves.iter().zip(grads).filter_map(|(leaf, grad)| Some((leaf, grad?))) {
            let sum = match waiting.remove(&leaf) {
                None => grad,
                Some(before) => Dispatch::float_add(before, grad),
            };
            waiting.insert(leaf, sum);
        }
    }

    /// Adds to gradients of these leaves what has waited for each; returns whether anything has.
    pub(super) fn take(&self, stage: Stage, leaves: &[NodeId], grads: &mut [Option<DispatchTensor>]) -> Vec<bool> {
        let mut waiting = self.0.lock();
        waiting.settle(stage, leaves);
        let waiting = waiting.stage(stage);
        let add = |(leaf, grad): (&NodeId, &mut Option<DispatchTensor>)| {
            let before = waiting.remove(leaf);
            let has_waited = before.is_some();
            if let Some(before) = before {
                *grad = Some(match grad.take() {
                    None => before,
                    Some(grad) => Dispatch::float_add(before, grad),
                });
            }
            has_waited
        };
        leaves.iter().zip(grads).map(add).collect()
    }

    /// Takes the oldest reduction that was put off: of whole gradients first, and of those that only replicas have not reduced
    /// if they are to `all_reduce`.
    pub(super) fn next(&self, all_reduce: bool) -> Option<(Stage, Trained)> {
        let put_off = &mut self.0.lock().put_off;
        let at = |wanted| put_off.iter().position(|(stage, _)| *stage == wanted);
        let at = at(Stage::Whole).or_else(|| at(Stage::Scattered).filter(|_| all_reduce))?;
        Some(put_off.remove(at))
    }

    /// Returns true if a reduction was put off.
    pub(super) fn is_any(&self) -> bool {
        !self.0.lock().put_off.is_empty()
    }

    /// The optimizer steps without them, though they were to be reduced.
    pub(super) fn miss_step(&self) {
        self.0.lock().has_missed_step = true;
    }

    /// Whether a step has missed one, or one waits for a leaf that is none of these.
    pub(super) fn is_too_late(&self, leaves: impl Fn(&NodeId) -> bool) -> bool {
        let waiting = self.0.lock();
        waiting.has_missed_step || waiting.whole.keys().chain(waiting.scattered.keys()).any(|leaf| !leaves(leaf))
    }

    pub(super) fn clear(&self) {
        *self.0.lock() = ByStage::default();
    }
}
