//! `BatchNorm`.

use burn::module::RunningState;
use burn::nn::BatchNorm;
use burn::tensor::Tensor;

use super::{DTensorForward, apply_style, read};
use crate::Result;
use crate::dtensor::DTensor;
use crate::dtensor::ops::module::{self, BatchNormTrainOutput};
use crate::error::OrUnwind;
use crate::mesh::DeviceMesh;
use crate::placement::Placement;

/// The statistics are those of the whole batch, however the mesh's ranks share it: what other frameworks call
/// synchronized batch normalization. Shares may be uneven, or empty.
///
/// As burn's own, it normalizes by its batch in training, and by its running statistics where the input is on a
/// device without autodiff or the layer is frozen; running variances are without Bessel's correction. Every rank
/// keeps the running statistics of all channels, and they are the same on all ranks of the mesh, so that a record
/// or [`valid`](burn::module::Module::valid) needs no synchronization. Half precision is normalized in single
/// precision.
///
/// The mesh is that of [`parallelize`](crate::parallel::parallelize): to share one batch over ranks that hold all
/// parameters, place nothing.
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
///     assert!((mean - 0.3).abs() < 1e-6); // momentum 0.1, of the mean of all three
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// Under [`fully_shard`](crate::fsdp::fully_shard) each data-parallel rank has a batch of its own, and plain
/// tensors, or DTensors on a tensor-parallel slice, have the statistics of that batch alone. For statistics of
/// all of it make the batch one DTensor as here: over the ranks that share it parameters are then whole, or cut
/// where the plan places them so (`("**.weight", Placement::Shard(0))`), and what needs a weight gathers it.
impl<const D: usize> DTensorForward<DTensor<D>> for BatchNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let training = x.local().is_autodiff() && self.training.is_enabled();
        let (device, mesh) = (x.local().device(), x.mesh().clone());
        apply_style(&self.gamma, x, |x, gamma| {
            let beta = read(&self.beta);
            if !training {
                let statistics =
                    |state: &RunningState<Tensor<1>>| replicated(state.value().to_device(&device), &mesh).or_unwind();
                let (mean, variance) = (statistics(&self.running_mean), statistics(&self.running_var));
                return module::batch_norm(x, gamma, beta, mean, variance, self.epsilon);
            }
            let BatchNormTrainOutput { output, mean, variance } =
                module::batch_norm_train(x, gamma, beta, self.epsilon);
            let [mean, variance] = of_all_channels(mean, variance).or_unwind();
            follow(&self.running_mean, mean, self.momentum);
            follow(&self.running_var, variance, self.momentum);
            output
        })
    }
}

fn replicated<const D: usize>(tensor: Tensor<D>, mesh: &DeviceMesh) -> Result<DTensor<D>> {
    DTensor::from_local(tensor, mesh, &vec![Placement::Replicate; mesh.ndim()])
}

/// Where ranks normalize channels of their own, one all-gather of both.
fn of_all_channels(mean: DTensor<1>, variance: DTensor<1>) -> Result<[Tensor<1>; 2]> {
    if mean.placements().iter().all(|placement| placement.is_replicate()) {
        return Ok([mean.to_local(), variance.to_local()]);
    }
    let both = DTensor::stack::<2>(vec![mean, variance], 0).full_tensor()?;
    Ok([0, 1].map(|at| both.clone().narrow(0, at, 1).squeeze_dim(0)))
}

/// Moves `state` towards the statistics of a batch.
fn follow(state: &RunningState<Tensor<1>>, batch: Tensor<1>, momentum: f64) {
    let old = state.value_sync().to_device(&batch.device());
    let batch = batch.cast(old.dtype());
    state.update(old.mul_scalar(1.0 - momentum).add(batch.mul_scalar(momentum)).detach());
}
