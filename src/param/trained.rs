//! [`Trained`]: the trained parameters of a pass, whose gradients one reduction transfers.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::DType;

use super::storage::{ShardGatherer, zeros_of};
use super::unit::Unit;

/// The trained parameters of one forward through a unit.
///
/// If the reduction of its gradients is postponed to a later backward, this outlives the pass.
#[derive(Debug, Clone)]
pub(super) struct Trained {
    pub(super) source: Arc<ShardGatherer>,
    /// Positions among the parameters of the source.
    positions: Vec<usize>,
    /// The shards' leaves, to which the gradients belong.
    pub(super) leaves: Vec<NodeId>,
}

impl Trained {
    /// Selects the parameters of `source` that have a leaf.
    pub(super) fn new(source: Arc<ShardGatherer>, leaves: &[Option<NodeId>]) -> Self {
        let trained = leaves.iter().enumerate().filter_map(|(position, leaf)| Some((position, (*leaf)?)));
        let (positions, leaves) = trained.unzip();
        Self { source, positions, leaves }
    }

    pub(super) fn unit(&self) -> &Arc<Unit> {
        self.source.unit()
    }

    /// Selects the gradients of these parameters from those of all weights of the source. `None` stands for a
    /// parameter that this rank has not used.
    pub(super) fn take(&self, mut grads: Vec<Option<DispatchTensor>>) -> Vec<Option<DispatchTensor>> {
        self.positions.iter().map(|&position| grads[position].take()).collect()
    }

    /// Returns the parameters as indices into the unit.
    pub(super) fn members(&self) -> Vec<usize> {
        self.positions.iter().map(|&position| self.source.members()[position]).collect()
    }

    /// Returns the element types of their shards.
    pub(super) fn stored(&self) -> impl Iterator<Item = DType> + '_ {
        self.positions.iter().map(|&position| self.source.shard(position).dtype())
    }

    /// Returns a zero gradient of the unsharded parameter at index `at` of this list.
    pub(super) fn zeros(&self, at: usize) -> DispatchTensor {
        let position = self.positions[at];
        let shape = &self.unit().params[self.source.members()[position]].shape;
        zeros_of(shape, &self.source.device(position), self.source.added_in(position))
    }

    /// Returns a zero gradient of this rank's shard of that parameter.
    pub(super) fn zeros_of_shard(&self, at: usize) -> DispatchTensor {
        let position = self.positions[at];
        let shape = self.source.shard(position).shape();
        zeros_of(&shape, &self.source.device(position), self.source.added_in(position))
    }
}
