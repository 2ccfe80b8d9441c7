//! Gradients of a unit on the way to the optimizer: collected from backward, accumulated, or
//! reduced.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Scalar};
use itertools::izip;
use parking_lot::Mutex;

use super::flags::FlaggedGrads;
use crate::comm::{CommError, Phase};
use crate::dtensor::MeshDims;
use crate::param::options::cast;
use crate::param::storage::ShardGatherer;

/// The trained parameters of one forward through a unit.
///
/// If the reduction of its gradients is postponed to a later backward, this outlives the pass.
#[derive(Debug, Clone)]
pub(crate) struct Trained {
    pub(crate) source: Arc<ShardGatherer>,
    /// Positions among the parameters of the source.
    positions: Vec<usize>,
    /// The parameters as indices into the unit.
    pub(crate) members: Vec<usize>,
    /// The shards' leaves, to which the gradients belong.
    pub(crate) leaves: Vec<NodeId>,
}

impl Trained {
    /// Selects the parameters of `source` that have a leaf.
    pub(crate) fn new(source: Arc<ShardGatherer>, leaves: &[Option<NodeId>]) -> Self {
        let trained = leaves
            .iter()
            .enumerate()
            .filter_map(|(position, leaf)| Some((position, (*leaf)?)));
        let (positions, leaves): (Vec<_>, _) = trained.unzip();
        let members = positions
            .iter()
            .map(|&position| source.members[position])
            .collect();
        Self {
            source,
            positions,
            members,
            leaves,
        }
    }

    /// Selects the gradients of these parameters from those of all weights of the source. `None`
    /// stands for a parameter that this rank has not used.
    pub(crate) fn select(
        &self,
        mut grads: Vec<Option<DispatchTensor>>,
    ) -> Vec<Option<DispatchTensor>> {
        self.positions
            .iter()
            .map(|&position| grads[position].take())
            .collect()
    }

    /// Multiplies gradients of these parameters by this rank's `weight`.
    pub(crate) fn weigh(
        &self,
        grads: Vec<Option<DispatchTensor>>,
        weight: f64,
    ) -> Vec<Option<DispatchTensor>> {
        if weight == 1.0 {
            return grads;
        }
        let weigh = |(at, grad): (usize, Option<DispatchTensor>)| match weight {
            // The gradient of rows that do not count may be infinite.
            0.0 => grad.map(|_| self.zeros(at)),
            _ => grad.map(|grad| Dispatch::float_mul_scalar(grad, Scalar::from(weight))),
        };
        grads.into_iter().enumerate().map(weigh).collect()
    }

    /// Returns the element types of their shards.
    pub(crate) fn stored(&self) -> impl Iterator<Item = DType> + '_ {
        self.positions
            .iter()
            .map(|&position| self.source.shards.at(position).dtype())
    }

    /// Returns a zero gradient of the unsharded parameter at index `at` of this list.
    pub(crate) fn zeros(&self, at: usize) -> DispatchTensor {
        let position = self.positions[at];
        self.source
            .zeros(position, self.source.param(position).shape())
    }

    /// Returns a zero gradient of this rank's shard of that parameter.
    pub(crate) fn zeros_of_shard(&self, at: usize) -> DispatchTensor {
        let position = self.positions[at];
        self.source
            .zeros(position, self.source.shards.at(position).shape())
    }
}

/// Gradients that a backward has collected for the unsharded parameters of a pass, by position.
#[derive(Debug, Default)]
pub(crate) struct CollectedGrads {
    /// Gradients that are the same on all tensor-parallel ranks.
    grads: Vec<Option<DispatchTensor>>,
    /// Partial gradients that are expected or have arrived, by the mesh dimensions over which
    /// tensor-parallel ranks sum them. One is expected if the parameter was read for computations
    /// that differ along these dimensions, and then on all ranks.
    partial: BTreeMap<MeshDims, BTreeMap<usize, Option<DispatchTensor>>>,
}

impl CollectedGrads {
    /// Creates an empty set of gradients for `n` parameters.
    pub(crate) fn new(n: usize) -> Self {
        Self {
            grads: vec![None; n],
            partial: BTreeMap::new(),
        }
    }

    /// Adds `grad` to the gradient at `position`. A parameter that checkpointed blocks read has
    /// several gradients.
    pub(crate) fn add(&mut self, position: usize, grad: DispatchTensor) {
        let sum = &mut self.grads[position];
        *sum = self::sum(sum.take(), Some(grad));
    }

    /// Records that the parameter at `position` was read for computations that differ along the
    /// mesh dimensions `dims`.
    pub(crate) fn expect_partial(&mut self, position: usize, dims: &[usize]) {
        self.partial
            .entry(dims.into())
            .or_default()
            .entry(position)
            .or_default();
    }

    pub(crate) fn is_partial_expected(&self, position: usize) -> bool {
        self.partial
            .values()
            .any(|expected| expected.contains_key(&position))
    }

    /// Adds this rank's partial gradient of the parameter at `position`.
    pub(crate) fn add_partial(&mut self, position: usize, dims: &[usize], grad: DispatchTensor) {
        let expected = self
            .partial
            .get_mut(dims)
            .and_then(|expected| expected.get_mut(&position));
        let sum = expected.expect("the node of a partial gradient records it as expected");
        *sum = self::sum(sum.take(), Some(grad));
    }

    #[cfg(feature = "testing")]
    pub(crate) fn is_any(&self) -> bool {
        self.grads
            .iter()
            .chain(self.partial.values().flat_map(BTreeMap::values))
            .any(Option::is_some)
    }

    /// Takes the gradients by position, after summing the partial gradients of tensor-parallel
    /// ranks.
    ///
    /// All sums (of partial gradients, of accumulated gradients, and of the averages) use the
    /// unit's reduction element type, or else the element type in which the parameter is stored.
    /// The element type of the gradient itself does not matter. So one reduce-scatter may carry
    /// tensors of several types. The result on this rank has the element type of its shard.
    ///
    /// # Collective
    /// On the tensor-parallel ranks, if gradients are partial.
    pub(crate) fn take(
        &mut self,
        source: &ShardGatherer,
    ) -> Result<Vec<Option<DispatchTensor>>, CommError> {
        let Self { grads, partial } = mem::take(self);
        let to_add = |(position, grad): (usize, Option<_>)| {
            Some(cast(grad?, Some(source.added_in(position))))
        };
        let mut grads: Vec<_> = grads.into_iter().enumerate().map(to_add).collect();
        for (dims, partial) in partial {
            let positions: Vec<_> = partial.keys().copied().collect();
            let own = FlaggedGrads::new(partial.into_iter().map(to_add).collect(), |at| {
                source.zeros(positions[at], source.param(positions[at]).shape())
            });
            let names = positions
                .iter()
                .map(|&position| source.param(position).path.clone());
            let group = source
                .comm
                .spec
                .tensor
                .as_ref()
                .expect("only parallelized parameters have partial gradients");
            let sums = group.sum(&dims, source.call(Phase::Backward), names, own)?;
            for (position, partial) in positions.into_iter().zip(sums) {
                grads[position] = sum(grads[position].take(), partial);
            }
        }
        Ok(grads)
    }
}

/// Gradients of a unit that backwards did not reduce, or reduced only over the ranks that shard
/// (gradient accumulation), by the autodiff leaf of their parameter. An optimizer step replaces the
/// leaves.
///
/// ```text
///   backward   full gradients ─── no sync ──────> full       (this rank's sum)
///                    │ + full
///              reduce-scatter ── no all-reduce ─> scattered  (this rank's shard of the sum over the ranks that shard)
///                    │ + scattered
///              all-reduce over replicas ────────> the optimizer
/// ```
///
/// The next backward that reduces the unit includes them. A backward that does not enter the unit,
/// but reduces other units of its model, [reduces them at its
/// end](super::GradReducer::reduce_postponed).
#[derive(Debug, Default)]
pub(crate) struct AccumulatedGrads(Mutex<ByStage>);

#[derive(Debug, Default)]
struct ByStage {
    /// Gradients of each [`GradStage`].
    stages: [GradsByLeaf; 2],
    /// True if the optimizer stepped without these gradients although they should have been reduced
    /// before.
    has_missed_step: bool,
}

type GradsByLeaf = HashMap<NodeId, AccumulatedGrad>;

#[derive(Debug)]
struct AccumulatedGrad {
    /// Index of the parameter in the unit.
    member: usize,
    /// `None` if the reduction was postponed although this rank has no gradient, so that all ranks
    /// have the same leaves.
    grad: Option<DispatchTensor>,
}

/// Progress of a gradient's reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GradStage {
    /// The gradient is not reduced.
    Full,
    /// The gradient is reduced over the ranks that shard.
    Scattered,
}

impl AccumulatedGrads {
    /// Postpones the reduction of these gradients, and adds them to the accumulated ones.
    pub(crate) fn add(
        &self,
        stage: GradStage,
        trained: &Trained,
        grads: Vec<Option<DispatchTensor>>,
    ) {
        let accumulated = &mut self.0.lock().stages[stage as usize];
        for (&member, &leaf, grad) in izip!(&trained.members, &trained.leaves, grads) {
            let before = accumulated.remove(&leaf).and_then(|before| before.grad);
            accumulated.insert(
                leaf,
                AccumulatedGrad {
                    member,
                    grad: sum(before, grad),
                },
            );
        }
    }

    /// Removes the accumulated gradients of these leaves, and adds them to `grads`. Returns, per
    /// leaf, true if there was one.
    pub(crate) fn take(
        &self,
        stage: GradStage,
        leaves: &[NodeId],
        grads: &mut [Option<DispatchTensor>],
    ) -> Vec<bool> {
        let mut accumulated = self.0.lock();
        let of_stage = &mut accumulated.stages[stage as usize];
        let add = |(leaf, grad): (&NodeId, &mut Option<DispatchTensor>)| {
            let before = of_stage.remove(leaf).and_then(|before| before.grad);
            let was_accumulated = before.is_some();
            *grad = sum(before, grad.take());
            was_accumulated
        };
        let were_accumulated = leaves.iter().zip(grads).map(add).collect();
        accumulated.has_missed_step &= accumulated.stages.iter().any(|stage| !stage.is_empty());
        were_accumulated
    }

    /// Returns true if the reduction of one of these leaves was postponed.
    pub(crate) fn has(&self, stage: GradStage, leaves: &[NodeId]) -> bool {
        let accumulated = &self.0.lock().stages[stage as usize];
        leaves.iter().any(|leaf| accumulated.contains_key(leaf))
    }

    /// Returns true if any reduction was postponed.
    pub(crate) fn is_any(&self) -> bool {
        self.0.lock().stages.iter().any(|stage| !stage.is_empty())
    }

    /// Records that the optimizer steps without these gradients although they should have been
    /// reduced before.
    pub(crate) fn miss_step(&self) {
        self.0.lock().has_missed_step = true;
    }

    /// Returns true if the gradients can no longer be used: a step was taken without them, or
    /// `is_current` returns false for a parameter of the unit and the leaf of its gradient.
    pub(crate) fn is_too_late(&self, is_current: impl Fn(usize, NodeId) -> bool) -> bool {
        let accumulated = self.0.lock();
        let mut grads = accumulated.stages.iter().flatten();
        accumulated.has_missed_step || grads.any(|(leaf, grad)| !is_current(grad.member, *leaf))
    }

    pub(crate) fn clear(&self) {
        *self.0.lock() = ByStage::default();
    }
}

fn sum(a: Option<DispatchTensor>, b: Option<DispatchTensor>) -> Option<DispatchTensor> {
    match (a, b) {
        (Some(a), Some(b)) => Some(Dispatch::float_add(a, b)),
        (a, b) => a.or(b),
    }
}
