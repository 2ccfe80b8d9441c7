//! Forward of `BatchNorm`, with synchronized statistics over DTensors.

use burn::module::RunningState;
use burn::nn::BatchNorm;
use burn::tensor::Tensor;

use super::{DTensorForward, apply_style, read};
use crate::Result;
use crate::dtensor::DTensor;
use crate::dtensor::ops::module::{self, BatchNormTrainOutput};
use crate::error::OrUnwind;

/// Normalizes by the statistics of the global batch, for any sharding of it over the ranks of the
/// mesh (synchronized batch normalization). Shards may be uneven or empty.
///
/// As in burn, the layer uses the statistics of the batch in training. It uses the running
/// statistics if the input is on a device without autodiff or the layer is frozen. Running
/// variances are computed without Bessel's correction. Every rank stores the running statistics of
/// all channels, identical on all ranks of the mesh, so a record or
/// [`valid`](burn::module::Module::valid) needs no synchronization. Half precision is normalized in
/// single precision.
///
/// The mesh is the one passed to [`parallelize`](crate::parallel::parallelize). To share one batch
/// among ranks that all hold all parameters, use a plan without placements.
///
/// ```
/// use burn::nn::{BatchNorm, BatchNormConfig};
/// use burn::tensor::Tensor;
/// use burn_dtensor::prelude::*;
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["batch"])?;
///     let device = world.device().clone().autodiff();
///     let norm: BatchNorm = parallelize(BatchNormConfig::new(1).init(&device), &mesh, Plan::new())?;
///     // Three rows: two on the first rank, one on the other.
///     let x = Tensor::<2>::from_floats([[1.0], [2.0], [6.0]], &device);
///     let y = norm.forward_dtensor(DTensor::distribute_replicated(x, &mesh, &[Placement::Shard(0)])?);
///     assert_eq!(y.placements(), [Placement::Shard(0)]);
///     let mean = norm.running_mean.value_sync().into_scalar::<f32>();
///     assert!((mean - 0.3).abs() < 1e-6); // momentum 0.1, and 3 is the mean of all rows
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// Under [`fully_shard`](crate::fsdp::fully_shard) each data-parallel rank has a separate batch.
/// With plain tensors, or with DTensors on a tensor-parallel slice, the statistics are those of
/// that batch only. For statistics over the batches of all ranks, make the batch one DTensor as in
/// this example. The parameters are then replicated over the ranks that share the batch, or sharded
/// where the plan says so (`("**.weight", Placement::Shard(0))`); operators that need a sharded
/// weight all-gather it.
impl<const D: usize> DTensorForward<DTensor<D>> for BatchNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let training = x.local().is_autodiff() && self.training.is_enabled();
        let device = x.local().device();
        let mesh = x.mesh().clone();
        apply_style(&self.gamma, x, |x, gamma| {
            let beta = read(&self.beta, gamma.mesh());
            if !training {
                let statistics = |state: &RunningState<Tensor<1>>| {
                    DTensor::replicated_on(state.value().to_device(&device), &mesh).or_unwind()
                };
                let mean = statistics(&self.running_mean);
                let variance = statistics(&self.running_var);
                return module::batch_norm(x, gamma, beta, mean, variance, self.epsilon);
            }
            let BatchNormTrainOutput {
                output,
                mean,
                variance,
            } = module::batch_norm_train(x, gamma, beta, self.epsilon);
            let [mean, variance] = of_all_channels(mean, variance).or_unwind();
            follow(&self.running_mean, mean, self.momentum);
            follow(&self.running_var, variance, self.momentum);
            output
        })
    }
}

/// Returns both statistics for all channels. If each rank normalized only some of the channels,
/// this takes one all-gather for both.
fn of_all_channels(mean: DTensor<1>, variance: DTensor<1>) -> Result<[Tensor<1>; 2]> {
    if mean
        .placements()
        .iter()
        .all(|placement| placement.is_replicate())
    {
        return Ok([mean.to_local(), variance.to_local()]);
    }
    let both = DTensor::stack::<2>(vec![mean, variance], 0).full_tensor()?;
    Ok([0, 1].map(|at| both.clone().narrow(0, at, 1).squeeze_dim(0)))
}

/// Updates the running average `state` with the statistics of a batch.
fn follow(state: &RunningState<Tensor<1>>, batch: Tensor<1>, momentum: f64) {
    let old = state.value_sync().to_device(&batch.device());
    let batch = batch.cast(old.dtype());
    state.update(
        old.mul_scalar(1.0 - momentum)
            .add(batch.mul_scalar(momentum))
            .detach(),
    );
}
