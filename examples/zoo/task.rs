//! [`Task`]: interface of a model for the trainer.

use std::ops::Range;

use burn::optim::ModuleOptimizer;
use burn::prelude::*;
use burn::tensor::activation::log_softmax;
use burn_dtensor::optim::ShardedOptimizer;
use burn_dtensor::prelude::*;

/// A model with its loss and its distribution.
pub trait Task: Module + Sync + 'static {
    /// Source of batches.
    type Data: Sync;

    /// Returns the mean loss `[1]` of rows `rows` of the batch (seed, number).
    fn loss(
        &self,
        data: &Self::Data,
        batch: (u64, usize),
        rows: Range<usize>,
        device: &Device,
    ) -> Tensor<1>;

    /// Names of the mesh dimensions. A mesh with fewer dimensions uses the last names. Ranks along
    /// `tp` train on the same rows.
    const DIMS: &'static [&'static str];

    /// Distributes the model over the mesh.
    ///
    /// # Collective
    /// Every rank calls it.
    fn parallel(self, mesh: &DeviceMesh) -> Result<Self>;

    /// Returns an optimizer for the distributed model, and the equivalent one for the unsharded
    /// model in burn only.
    fn optimizers() -> (ShardedOptimizer, ModuleOptimizer);
}

/// Returns the mean cross entropy `[1]` of `logits` `[batch, seq, classes]` for `targets` `[batch,
/// seq]`.
pub fn mean_cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    log_softmax(logits, 2)
        .gather(2, targets.unsqueeze_dim(2))
        .mean()
        .neg()
}
