//! [`Trained`]: the parameters of a pass whose gradients one reduction moves.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::DType;

use super::buffer::{Source, zeros_of};
use super::reduce::Reduction;
use super::unit::Unit;
use super::waiting::Stage;

/// The trained parameters of one forward through a unit.
///
/// It outlives the pass where its gradients wait for a later backward.
#[derive(Debug, Clone)]
pub(super) struct Trained {
    pub(super) source: Arc<Source>,
    /// Positions among the parameters of the source.
    positions: Vec<usize>,
    /// Whose gradients those are.
    pub(super) leaves: Vec<NodeId>,
}

impl Trained {
    /// Those of the parameters of `source` that have a leaf.
    pub(super) fn new(source: Arc<Source>, leaves: &[Option<NodeId>]) -> Self {
        let trained = leaves.iter().enumerate().filter_map(|(position, leaf)| Some((position, (*leaf)?)));
        let (positions, leaves) = trained.unzip();
        Self { source, positions, leaves }
    }

    pub(super) fn unit(&self) -> &Arc<Unit> {
        self.source.unit()
    }

    pub(super) fn positions(&self) -> &[usize] {
        &self.positions
    }

    /// The parameters, as indices into the unit.
    pub(super) fn members(&self) -> Vec<usize> {
        self.positions.iter().map(|&position| self.source.members()[position]).collect()
    }

    /// The element types of their shards.
    pub(super) fn stored(&self) -> impl Iterator<Item = DType> + '_ {
        self.positions.iter().map(|&position| self.source.shard(position).dtype())
    }

    /// A zero gradient of the whole parameter `at` that place among these.
    pub(super) fn zeros(&self, at: usize) -> DispatchTensor {
        let position = self.positions[at];
        let shape = &self.unit().params[self.source.members()[position]].shape;
        zeros_of(shape, &self.source.device(position), self.source.added_in(position))
    }

    /// The same of this rank's shard.
    pub(super) fn zeros_of_shard(&self, at: usize) -> DispatchTensor {
        let position = self.positions[at];
        let shape = self.source.shard(position).shape();
        zeros_of(&shape, &self.source.device(position), self.source.added_in(position))
    }

    /// Issues the reduction of these gradients and of those that wait: of each parameter one, `None` of one that this rank has
    /// not used. `None` if they wait with the unit instead.
    ///
    /// # Collective
    /// Of the data-parallel ranks.
    pub(super) fn reduce(self, mut grads: Vec<Option<DispatchTensor>>) -> Option<Reduction> {
        let unit = self.unit().clone();
        if !unit.control.lock().sync {
            unit.waiting.add(Stage::Whole, &self, grads);
            return None;
        }
        unit.waiting.take(Stage::Whole, &self.leaves, &mut grads);
        Some(Reduction::issue(self, grads))
    }

    /// Issues the reduction of gradients that wait at this stage.
    ///
    /// # Collective
    /// As [`reduce`](Self::reduce).
    pub(super) fn reduce_waiting(self, stage: Stage) -> Option<Reduction> {
        match stage {
            Stage::Whole => {
                let none = vec![None; self.leaves.len()];
                self.reduce(none)
            }
            Stage::Scattered => Some(Reduction::issue_scattered(self)),
        }
    }
}
