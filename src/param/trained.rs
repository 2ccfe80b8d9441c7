//! [`Trained`]: the parameters of a pass whose gradients one reduction moves.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::DType;

use super::storage::{ShardGatherer, zeros_of};
use super::unit::Unit;

/// The trained parameters of one forward through a unit.
///
/// It outlives the pass where its gradients wait for a later backward.
#[derive(Debug, Clone)]
pub(super) struct Trained {
    pub(super) source: Arc<ShardGatherer>,
    /// Positions among the parameters of the source.
    positions: Vec<usize>,
    /// Whose gradients those are.
    pub(super) leaves: Vec<NodeId>,
}

impl Trained {
    /// Those of the parameters of `source` that have a leaf.
    pub(super) fn new(source: Arc<ShardGatherer>, leaves: &[Option<NodeId>]) -> Self {
        let trained = leaves.iter().enumerate().filter_map(|(position, leaf)| Some((position, (*leaf)?)));
        let (positions, leaves) = trained.unzip();
        Self { source, positions, leaves }
    }

    pub(super) fn unit(&self) -> &Arc<Unit> {
        self.source.unit()
    }

    /// Takes their gradients, `None` of one that this rank has not used, out of those of all weights of the source.
    pub(super) fn take(&self, mut grads: Vec<Option<DispatchTensor>>) -> Vec<Option<DispatchTensor>> {
        self.positions.iter().map(|&position| grads[position].take()).collect()
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
}
