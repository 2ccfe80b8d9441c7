//! [`Waiting`]: gradients of backwards that were not to reduce them, or not over all ranks.
//!
//! ```text
//!   backward   whole gradients ── no sync ──────> whole      (this rank's sum)
//!                    │ + whole
//!              reduce-scatter ── no all-reduce ─> scattered  (this rank's shard of the sum over the ranks that shard)
//!                    │ + scattered
//!              all-reduce over replicas ────────> the optimizer
//! ```

use std::collections::HashMap;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor};
use parking_lot::Mutex;

/// Gradients that wait, by the leaf that they are for: an optimizer step makes new leaves.
#[derive(Debug, Default)]
pub(super) struct Waiting(Mutex<ByStage>);

#[derive(Debug, Default)]
struct ByStage {
    whole: HashMap<NodeId, DispatchTensor>,
    scattered: HashMap<NodeId, DispatchTensor>,
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
}

impl Waiting {
    /// Adds gradients to those that wait; `None` adds nothing.
    pub(super) fn add(&self, stage: Stage, grads: impl IntoIterator<Item = (NodeId, Option<DispatchTensor>)>) {
        let mut waiting = self.0.lock();
        let waiting = waiting.stage(stage);
        for (leaf, grad) in grads.into_iter().filter_map(|(leaf, grad)| Some((leaf, grad?))) {
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

    /// Whether one waits for a leaf that is none of these.
    pub(super) fn is_any_for_others(&self, leaves: impl Fn(&NodeId) -> bool) -> bool {
        let waiting = self.0.lock();
        waiting.whole.keys().chain(waiting.scattered.keys()).any(|leaf| !leaves(leaf))
    }

    pub(super) fn clear(&self) {
        *self.0.lock() = ByStage::default();
    }
}
