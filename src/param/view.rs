//! [`ParamExt`]: the distributed views of a parameter.

use std::sync::Arc;

use burn::module::Param;
use burn::tensor::Tensor;

use super::distributed::DistributedParameter;
use super::{Grads, ParamError, read};
use crate::Result;
use crate::dtensor::DTensor;

/// The distributed views of a parameter.
///
/// | view | what it is | communicates over |
/// |---|---|---|
/// | [`val`](Param::val) | the full weight, for burn's own layers | data-parallel and tensor-parallel ranks |
/// | [`dtensor`](Self::dtensor) | a DTensor on the tensor-parallel mesh, for layers on DTensor | data-parallel ranks |
/// | [`shard`](Self::shard) | this rank's shard, which the optimizer steps | nothing |
///
/// burn keeps gradients for the tensor that a parameter stores, which is the shard: `param.val().grad(..)` is
/// `None` for a distributed parameter. Its gradient has two views:
///
/// | view | what it is | communicates over |
/// |---|---|---|
/// | [`shard_grad`](Self::shard_grad) | this rank's shard of the gradient, with which the optimizer steps | nothing |
/// | [`full_grad`](Self::full_grad) | the full gradient | data-parallel and tensor-parallel ranks |
pub trait ParamExt<const D: usize> {
    /// Returns the parameter for layers that compute with [`DTensor`]: on the mesh on which
    /// [`parallelize`](crate::parallel::parallelize) placed it, gathered over the data-parallel ranks.
    ///
    /// Read it in every forward. Its gradient is averaged over the data-parallel ranks together with its unit. If
    /// tensor-parallel ranks compute different things with a replicated parameter, they read it through
    /// [`vary`](DTensor::vary), as operators do automatically. The partial gradients that result are summed with
    /// all others of the unit in one all-reduce. Partial gradients of a tensor made from it, such as a transpose,
    /// are summed in a separate all-reduce.
    ///
    /// An ordinary parameter is on the [mesh of its device](crate::mesh::DeviceMesh::single_device), also inside a
    /// launch, so that a model that is not distributed computes there as it does outside. It does not combine with
    /// tensors on a mesh of ranks ([`DTensorError::OneDevice`](crate::dtensor::DTensorError::OneDevice)).
    ///
    /// # Collective
    /// Outside its unit's scope: an all-gather over the data-parallel ranks. Inside it: local.
    ///
    /// # Errors
    /// [`ParamError::NotParallelized`] for a parameter that `fully_shard` distributed and `parallelize` did not.
    ///
    /// # Panics
    /// Like [`unit`](fn@super::unit).
    fn dtensor(&self) -> Result<DTensor<D>>;

    /// Returns this rank's shard, which the optimizer steps, as a [`DTensor`] on the mesh of all data-parallel and
    /// tensor-parallel dimensions that place it. Returns `None` for an ordinary parameter.
    ///
    /// If both kinds of dimensions shard one tensor dimension, tensor parallelism shards it first. Local: no
    /// communication.
    fn shard(&self) -> Option<DTensor<D>>;

    /// Returns this rank's shard of the gradient, averaged over the data-parallel ranks and laid out as
    /// [`shard`](Self::shard). Returns `None` for a frozen parameter, for one that no rank has used, and for an
    /// ordinary one, whose gradient is [`full_grad`](Self::full_grad).
    ///
    /// `grads` is the result of `backward`, or the `GradientsParams` made of it. Local: no communication.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::tensor::Tensor;
    /// # use burn_dtensor::prelude::*;
    /// launch(Launch::threads(2), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
    ///     let device = world.device().clone().autodiff();
    ///     let layer = fully_shard(LinearConfig::new(4, 3).init(&device), &mesh, FullyShard::new())?;
    ///     let x = Tensor::<2>::ones([1, 4], &device) * world.rank() as f32;
    ///     let grads = layer.forward(x).sum().backward();
    ///     let shard = layer.weight.shard_grad(&grads).expect("the weight is in the loss");
    ///     assert_eq!(shard.local().dims(), [2, 3]);
    ///     let full = layer.weight.full_grad(&grads)?.expect("the weight is in the loss");
    ///     assert_eq!(full.into_data().iter::<f32>().collect::<Vec<_>>(), [0.5; 12]); // mean of the ranks' 0 and 1
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    fn shard_grad(&self, grads: &impl Grads) -> Option<DTensor<D>>;

    /// Returns the full gradient, averaged over the data-parallel ranks, on every rank. Returns `None` for a frozen
    /// parameter and for one that no rank has used. For an ordinary parameter it is burn's gradient on this rank.
    ///
    /// # Collective
    /// For a distributed parameter: on every rank of its mesh.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    fn full_grad(&self, grads: &impl Grads) -> Result<Option<Tensor<D>>>;
}

impl<const D: usize> ParamExt<D> for Param<Tensor<D>> {
    fn dtensor(&self) -> Result<DTensor<D>> {
        match self.reparameterization::<DistributedParameter>() {
            Some(_) => placed(self),
            None => Ok(self.val().into()),
        }
    }

    fn shard(&self) -> Option<DTensor<D>> {
        as_shard(self, self.base())
    }

    fn shard_grad(&self, grads: &impl Grads) -> Option<DTensor<D>> {
        as_shard(self, grads.of(self)?)
    }

    fn full_grad(&self, grads: &impl Grads) -> Result<Option<Tensor<D>>> {
        match self.reparameterization::<DistributedParameter>() {
            Some(_) => self.shard_grad(grads).map(DTensor::full_tensor).transpose(),
            None => Ok(grads.of(self)),
        }
    }
}

/// Returns a parallelized parameter as [`ParamExt::dtensor`] does.
///
/// # Errors
/// [`ParamError::NotParallelized`] for any other parameter.
pub(crate) fn placed<const D: usize>(param: &Param<Tensor<D>>) -> Result<DTensor<D>> {
    let distributed = param.reparameterization::<DistributedParameter>();
    let view = distributed.and_then(|distributed| read::dtensor(distributed, param.base()));
    view.ok_or_else(|| ParamError::NotParallelized { param: path(param) }.into())
}

/// Returns `local`, laid out as the stored shard of `param`, as a DTensor; `None` for an ordinary parameter.
fn as_shard<const D: usize>(param: &Param<Tensor<D>>, local: Tensor<D>) -> Option<DTensor<D>> {
    let spec = param.reparameterization::<DistributedParameter>()?.spec(local.dtype());
    Some(DTensor::from_parts(local, spec))
}

/// Returns the path of the module that has the parameter as a field, in the model that was distributed.
pub(crate) fn module_path<const D: usize>(param: &Param<Tensor<D>>) -> Option<Arc<str>> {
    let path = &param.reparameterization::<DistributedParameter>()?.info().path;
    Some(path.rsplit_once('.').map_or("root", |(module, _)| module).into())
}

/// Returns the parameter's path in the model that was distributed, or else its shape, for messages.
pub(crate) fn path<const D: usize>(param: &Param<Tensor<D>>) -> String {
    match param.reparameterization::<DistributedParameter>() {
        Some(distributed) => distributed.info().path.to_string(),
        None => format!("of shape {:?}", param.base().dims()),
    }
}
