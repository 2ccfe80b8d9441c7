//! Forward of `BatchNorm`, with synchronized statistics over DTensors.

use burn::module::RunningState;
use burn::nn::BatchNorm;
use burn::tensor::Tensor;

use super::{DTensorForward, apply_style, read};
use crate::Result;
use crate::comm::Call;
use crate::dtensor::DTensor;
use crate::dtensor::ops::module::{self, BatchNormTrainOutput};
use crate::error::OrUnwind;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement};

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

/// Runs the forward of burn's `BatchNorm` with the statistics of the batches of all ranks of `mesh`
/// (PyTorch's `SyncBatchNorm`), for data parallelism: each rank passes its own rows, as many as it
/// has, and gets its own rows.
///
/// Call it in place of `norm.forward(x)`. In training it normalizes by the joined batch, and the
/// running statistics follow that, the same on all ranks; running variances are without Bessel's
/// correction, as burn's. Outside of training it is burn's forward. The gradients of `gamma` and
/// `beta` are of this rank's rows, so that [`replicate`](crate::replicate::replicate) and
/// [`fully_shard`](crate::fsdp::fully_shard) average them like others. Call it inside a
/// [`unit`](fn@crate::fsdp::unit), to which a batch that may have no rows is passed as a DTensor.
/// For a batch that is one DTensor, call [`forward_dtensor`](DTensorForward::forward_dtensor).
///
/// ```
/// use burn::nn::{BatchNorm, BatchNormConfig};
/// use burn::tensor::Tensor;
/// use burn_dtensor::nn::sync_batch_norm;
/// use burn_dtensor::prelude::*;
/// use burn_dtensor::replicate::{DataParallel, replicate};
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["dp"])?;
///     let device = world.device().clone().autodiff();
///     let config = DataParallel::new().with_layer_warnings(false);
///     let norm: BatchNorm = replicate(BatchNormConfig::new(1).init(&device), &mesh, config)?;
///     let rows = if world.rank() == 0 { vec![1.0, 2.0] } else { vec![6.0] };
///     let x = Tensor::<1>::from_floats(&rows[..], &device).unsqueeze_dim::<2>(1);
///     let y = unit(&norm, x, |norm, x| sync_batch_norm(norm, x, &mesh))?;
///     assert_eq!(y.dims(), [rows.len(), 1]);
///     let mean = norm.running_mean.value_sync().into_scalar::<f32>();
///     assert!((mean - 0.3).abs() < 1e-6); // momentum 0.1, and 3 is the mean of all rows
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// # Shapes
/// - `x` and the output: `[rows of this rank, channels, ..]`
///
/// # Collective
/// Every rank of the mesh, in training: an all-gather of numbers, and in forward and in backward two
/// all-reduces of one number per channel, or for a small batch the all-gather of its rows if that
/// costs less. All ranks of the mesh must have rows of their own; a mesh of several dimensions counts
/// as one.
///
/// # Errors
/// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), and
/// [`Error::Comm`](crate::Error::Comm) if the ranks have other channels.
pub fn sync_batch_norm<const D: usize>(
    norm: &BatchNorm,
    x: Tensor<D>,
    mesh: &DeviceMesh,
) -> Result<Tensor<D>> {
    if !(x.is_autodiff() && norm.training.is_enabled()) {
        return Ok(norm.forward(x));
    }
    let all = mesh.all()?;
    let flat = match mesh.ndim() {
        1 => mesh.clone(),
        _ => mesh.flatten(mesh.names().to_vec())?,
    };
    let mesh = &flat;
    let (gamma, beta) = (norm.gamma.val(), norm.beta.val());
    let channels = gamma.dims()[0];
    let dtype = x.dtype();
    let options = (&x.device(), dtype);
    let constant = |value: f32| {
        let value = Tensor::full([channels], value, options);
        DTensor::replicated_on(value, mesh)
    };
    // The rows of each rank, as many as it has.
    let rows = all.all_gather_numbers(Call::new("sync_batch_norm"), &[x.dims()[0]])?;
    let mut shape = x.dims();
    shape[0] = rows.iter().sum();
    let even = Layout::new(mesh.shape(), &[Placement::Shard(0)])?;
    let layout = even.with_uneven_sizes(0, rows)?;
    let x = DTensor::from_local_with_layout(x, mesh, layout.clone(), shape)?;
    let BatchNormTrainOutput {
        output,
        mean,
        variance,
    } = module::batch_norm_train(x, constant(1.0)?, constant(0.0)?, norm.epsilon);
    let [mean, variance] = of_all_channels(mean, variance)?;
    follow(&norm.running_mean, mean, norm.momentum);
    follow(&norm.running_var, variance, norm.momentum);
    // A small batch may have been gathered.
    let output = output.redistribute_to(&layout)?.to_local();
    let output = output.cast(gamma.dtype());
    // Plain tensors, so that their gradients are those of this rank's rows; of no row if it has none.
    let rows = output.dims()[0].min(1);
    let mut shape = [1; D];
    shape[1] = channels;
    let of_rows = |vector: Tensor<1>| vector.reshape(shape).slice_dim(0, 0..rows);
    Ok((output * of_rows(gamma) + of_rows(beta)).cast(dtype))
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
