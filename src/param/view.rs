//! [`ParamExt`]: the distributed views of a parameter.

use std::sync::Arc;

use burn::module::Param;
use burn::tensor::Tensor;

use super::distributed::DistributedParameter;
use super::style::LayerStyles;
use super::{Grads, ParamError, Style, read};
use crate::Result;
use crate::dtensor::DTensor;

/// The distributed views of a parameter.
///
/// | view | what it is | communicates over |
/// |---|---|---|
/// | [`val`](Param::val) | the whole weight, for burn's own layers | data-parallel and tensor-parallel ranks |
/// | [`dtensor`](Self::dtensor) | a DTensor on the tensor-parallel mesh, for layers over DTensor | data-parallel ranks |
/// | [`shard`](Self::shard) | what the optimizer steps | nothing |
///
/// burn keeps gradients for what a parameter stores, which is the shard: `param.val().grad(..)` is `None` of
/// a distributed parameter. Its gradient has two views:
///
/// | view | what it is | communicates over |
/// |---|---|---|
/// | [`shard_grad`](Self::shard_grad) | what the optimizer steps by | nothing |
/// | [`full_grad`](Self::full_grad) | the whole gradient | data-parallel and tensor-parallel ranks |
pub trait ParamExt<const D: usize> {
    /// The parameter as layers over [`DTensor`] compute with it: on the mesh that
    /// [`parallelize`](crate::parallel::parallelize) placed it on, whole over the data-parallel
    /// ranks.
    ///
    /// Read it anew in every forward. Its gradient is averaged over the data-parallel ranks with its
    /// unit. Where tensor-parallel ranks compute different things with a replicated parameter, they
    /// read it through [`vary`](DTensor::vary), as operators do by themselves; the terms that they
    /// then have of its gradient are added up with all others of the unit, in one all-reduce. Of
    /// another tensor made from it, such as a transpose, they are added up by themselves.
    ///
    /// # Collective
    /// Outside its unit's scope an all-gather over the data-parallel ranks; inside it is local.
    ///
    /// # Errors
    /// [`ParamError::NotParallelized`] for a parameter without tensor-parallel placements.
    ///
    /// # Panics
    /// As [`unit`](fn@super::unit).
    fn dtensor(&self) -> Result<DTensor<D>>;

    /// This rank's shard, which is what the optimizer steps, as a [`DTensor`] on the mesh of all
    /// dimensions that place it, data-parallel and tensor-parallel; `None` for an ordinary
    /// parameter.
    ///
    /// Where both cut one tensor dimension, tensor parallelism cuts first. Local: no communication.
    fn shard(&self) -> Option<DTensor<D>>;

    /// This rank's shard of the gradient, averaged over the data-parallel ranks, laid out as
    /// [`shard`](Self::shard); `None` for a frozen parameter, one that no rank has used, and an ordinary
    /// one, whose gradient is [`full_grad`](Self::full_grad).
    ///
    /// `grads` is what `backward` returned, or the `GradientsParams` made of it. Local: no communication.
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
    ///     let whole = layer.weight.full_grad(&grads)?.expect("the weight is in the loss");
    ///     assert_eq!(whole.into_data().iter::<f32>().collect::<Vec<_>>(), [0.5; 12]); // of the ranks' 0 and 1
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    fn shard_grad(&self, grads: &impl Grads) -> Option<DTensor<D>>;

    /// The whole gradient, averaged over the data-parallel ranks, on every rank; `None` for a frozen parameter
    /// and one that no rank has used. Of an ordinary parameter it is burn's own, which is this rank's.
    ///
    /// # Collective
    /// Of a distributed parameter: every rank of its mesh.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    fn full_grad(&self, grads: &impl Grads) -> Result<Option<Tensor<D>>>;

    /// How [`parallelize`](crate::parallel::parallelize) placed the parameter, and where its layer
    /// brings activations, on each dimension of its mesh; nothing for a parameter without tensor-parallel
    /// placements.
    fn styles(&self) -> &[Style];
}

impl<const D: usize> ParamExt<D> for Param<Tensor<D>> {
    fn dtensor(&self) -> Result<DTensor<D>> {
        let param = self.reparameterization::<DistributedParameter>();
        let view = param.and_then(|param| read::dtensor(param, self.base()));
        view.ok_or_else(|| ParamError::NotParallelized { param: path(self) }.into())
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

    fn styles(&self) -> &[Style] {
        layer_styles(self).map_or(&[], |known| &known.styles)
    }
}

/// What the layer of `param` was given; `None` without tensor-parallel placements.
pub(crate) fn layer_styles<const D: usize>(param: &Param<Tensor<D>>) -> Option<&LayerStyles> {
    let param = param.reparameterization::<DistributedParameter>()?;
    param.info().parallel.as_ref().map(|parallel| &*parallel.styles)
}

/// What is laid out as the stored shard of `param`; `None` for an ordinary parameter.
fn as_shard<const D: usize>(param: &Param<Tensor<D>>, local: Tensor<D>) -> Option<DTensor<D>> {
    let spec = param.reparameterization::<DistributedParameter>()?.spec(local.dtype());
    Some(DTensor::from_parts(local, spec))
}

/// The path of the module that has the parameter as a field, in the model that was distributed.
pub(crate) fn module_path<const D: usize>(param: &Param<Tensor<D>>) -> Option<Arc<str>> {
    let path = &param.reparameterization::<DistributedParameter>()?.info().path;
    Some(path.rsplit_once('.').map_or("root", |(module, _)| module).into())
}

/// The parameter's path in the model that was distributed, or else its id: for messages.
pub(crate) fn path<const D: usize>(param: &Param<Tensor<D>>) -> String {
    match param.reparameterization::<DistributedParameter>() {
        Some(distributed) => distributed.info().path.to_string(),
        None => format!("id {}", param.id),
    }
}
