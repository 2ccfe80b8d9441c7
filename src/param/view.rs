//! [`ParamExt`]: the distributed views of a parameter.

use burn::module::Param;
use burn::tensor::Tensor;

use super::distributed::DistributedParameter;
use super::{ParamError, Style, read};
use crate::Result;
use crate::dtensor::DTensor;

/// The distributed views of a parameter.
///
/// | view | what it is | communicates over |
/// |---|---|---|
/// | [`val`](Param::val) | the whole weight, for burn's own layers | data-parallel and tensor-parallel ranks |
/// | [`dtensor`](Self::dtensor) | a DTensor on the tensor-parallel mesh, for layers over DTensor | data-parallel ranks |
/// | [`shard`](Self::shard) | what the optimizer steps | nothing |
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

    /// How [`parallelize`](crate::parallel::parallelize) placed the parameter, and where its layer
    /// brings activations; `None` for a parameter without tensor-parallel placements.
    fn style(&self) -> Option<Style>;
}

impl<const D: usize> ParamExt<D> for Param<Tensor<D>> {
    fn dtensor(&self) -> Result<DTensor<D>> {
        let param = self.reparameterization::<DistributedParameter>();
        let view = param.and_then(|param| read::dtensor(param, self.base()));
        view.ok_or_else(|| ParamError::NotParallelized { param: path(self) }.into())
    }

    fn shard(&self) -> Option<DTensor<D>> {
        let param = self.reparameterization::<DistributedParameter>()?;
        let base = self.base();
        let spec = param.spec(base.dtype());
        Some(DTensor::from_parts(base, spec))
    }

    fn style(&self) -> Option<Style> {
        let param = self.reparameterization::<DistributedParameter>()?;
        param.info().parallel.as_ref().map(|parallel| parallel.style)
    }
}

/// The parameter's path in the model that was distributed, or else its id: for messages.
pub(crate) fn path<const D: usize>(param: &Param<Tensor<D>>) -> String {
    match param.reparameterization::<DistributedParameter>() {
        Some(distributed) => distributed.info().path.clone(),
        None => format!("id {}", param.id),
    }
}
