//! [`Task`]: what the trainer asks of a model.

use std::ops::Range;

use burn::optim::ModuleOptimizer;
use burn::prelude::*;
use burn::tensor::activation::log_softmax;
use burn_dtensor::optim::ShardedOptimizer;
use burn_dtensor::prelude::*;

/// A model, what it learns, and how it is distributed.
pub trait Task: Module + Sync + 'static {
    /// Where batches come from.
    type Data: Sync;

    /// The mean loss `[1]` of rows `rows` of the batch of (seed, number).
    fn loss(&self, data: &Self::Data, batch: (u64, usize), rows: Range<usize>, device: &Device) -> Tensor<1>;

    /// Names of the mesh dimensions, of which a mesh of fewer has the last ones. Ranks along `tp` train on the same rows.
    const DIMS: &'static [&'static str];

    /// The model on the mesh.
    ///
    /// # Collective
    /// Every rank calls it.
    fn parallel(self, mesh: &DeviceMesh) -> Result<Self>;

    /// An optimizer of the model as it lies on ranks, and the same of the whole model, in burn alone.
    fn optimizers() -> (ShardedOptimizer, ModuleOptimizer);
}

/// Mean cross entropy `[1]` of `logits` `[batch, seq, classes]` for `targets` `[batch, seq]`.
pub fn mean_cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    log_softmax(logits, 2).gather(2, targets.unsqueeze_dim(2)).mean().neg()
}
