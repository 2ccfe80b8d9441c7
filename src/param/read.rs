//! The distributed views of a parameter ([`ParamExt`]), and reading it: in the open scope of its
//! unit, or in a scope opened for this parameter alone.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Param, Reparameterization};
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor};

use super::ParamError;
use super::begin_pass::UnitAccess;
use super::distributed::DistributedParameter;
use super::forward::pre_forward;
use super::panicked::note_read_outside;
use super::scope::ForwardScope;
use super::shards::LocalShards;
use super::sweep::sweep;
use super::unit::Unit;
use super::unit_stack::{self, UnitGuard};
use crate::dtensor::{DTensor, DTensorSpec};
use crate::error::OrUnwind;
use crate::placement::Placement;
use crate::{Error, Result};

/// The distributed views of a parameter.
///
/// | view | what it is | communicates over |
/// |---|---|---|
/// | [`val`](Param::val) | the full weight, for burn's own layers | data-parallel and tensor-parallel ranks |
/// | [`dtensor`](Self::dtensor) | a DTensor on the tensor-parallel mesh, or on one device, for layers on DTensor | data-parallel ranks |
/// | [`shard`](Self::shard) | this rank's shard, which the optimizer steps | nothing |
///
/// burn keeps gradients for the tensor that a parameter stores, which is the shard:
/// `param.val().grad(..)` is `None` for a distributed parameter. Its gradient has two views:
///
/// | view | what it is | communicates over |
/// |---|---|---|
/// | [`shard_grad`](Self::shard_grad) | this rank's shard of the gradient, with which the optimizer steps | nothing |
/// | [`full_grad`](Self::full_grad) | the full gradient | data-parallel and tensor-parallel ranks |
pub trait ParamExt<const D: usize> {
    /// Returns the parameter for layers that compute with [`DTensor`]: on the mesh on which
    /// [`parallelize`](crate::parallel::parallelize) placed it, gathered over the data-parallel
    /// ranks.
    ///
    /// Read it in every forward. Its gradient is averaged over the data-parallel ranks together
    /// with its unit. If tensor-parallel ranks compute different things with a replicated
    /// parameter, they read it through [`vary`](DTensor::vary), as operators do automatically. The
    /// partial gradients that result are summed with all others of the unit in one all-reduce.
    /// Partial gradients of a tensor made from it, such as a transpose, are summed in a separate
    /// all-reduce.
    ///
    /// A parameter that `parallelize` did not place is the full parameter on the [mesh of its
    /// device](crate::mesh::DeviceMesh::single_device), also inside a launch: an ordinary one, and
    /// one that `fully_shard` or `replicate` distributed. So one layer over DTensors computes on one
    /// device, data parallel and tensor parallel; in the first two cases its input is
    /// `DTensor::from(tensor)`. Such a parameter does not combine with tensors on a mesh of ranks
    /// ([`DTensorError::OneDevice`](crate::dtensor::DTensorError::OneDevice)).
    ///
    /// # Collective
    /// Outside its unit's scope: an all-gather over the data-parallel ranks. Inside it: local.
    ///
    /// # Errors
    /// None at present: a collective that fails unwinds.
    ///
    /// # Panics
    /// Like [`unit`](fn@super::unit).
    fn dtensor(&self) -> Result<DTensor<D>>;

    /// Returns this rank's shard, which the optimizer steps, as a [`DTensor`] on the mesh of all
    /// data-parallel and tensor-parallel dimensions that place it. Returns `None` for an ordinary
    /// parameter.
    ///
    /// If both kinds of dimensions shard one tensor dimension, tensor parallelism shards it first.
    /// Local: no communication.
    fn shard(&self) -> Option<DTensor<D>>;

    /// Returns this rank's shard of the gradient, averaged over the data-parallel ranks and laid
    /// out as [`shard`](Self::shard). Returns `None` for a frozen parameter, for one that no rank
    /// has used, and for an ordinary one, whose gradient is [`full_grad`](Self::full_grad).
    ///
    /// `grads` is the result of `backward`, or the `GradientsParams` made of it. Local: no
    /// communication.
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

    /// Returns the full gradient, averaged over the data-parallel ranks, on every rank. Returns
    /// `None` for a frozen parameter and for one that no rank has used. For an ordinary parameter
    /// it is burn's gradient on this rank.
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
            Some(distributed) if distributed.info().parallel.is_some() => placed(self),
            // Without tensor parallelism, each rank computes with the full parameter.
            _ => Ok(self.val().into()),
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
    let view = distributed.and_then(|distributed| dtensor_of(distributed, param.base()));
    view.ok_or_else(|| ParamError::NotParallelized { param: path(param) }.into())
}

/// Returns `local`, laid out as the stored shard of `param`, as a DTensor; `None` for an ordinary
/// parameter.
fn as_shard<const D: usize>(param: &Param<Tensor<D>>, local: Tensor<D>) -> Option<DTensor<D>> {
    let spec = param
        .reparameterization::<DistributedParameter>()?
        .spec(local.dtype());
    Some(DTensor::from_parts(local, spec))
}

/// Returns the path of the module that has the parameter as a field, in the model that was
/// distributed.
pub(crate) fn module_path<const D: usize>(param: &Param<Tensor<D>>) -> Option<Arc<str>> {
    let path = &param
        .reparameterization::<DistributedParameter>()?
        .info()
        .path;
    Some(
        path.rsplit_once('.')
            .map_or("root", |(module, _)| module)
            .into(),
    )
}

/// Returns the parameter's path in the model that was distributed, or else its shape, for messages.
pub(crate) fn path<const D: usize>(param: &Param<Tensor<D>>) -> String {
    match param.reparameterization::<DistributedParameter>() {
        Some(distributed) => distributed.info().path.to_string(),
        None => format!("of shape {:?}", param.base().dims()),
    }
}

/// Gradients of a model's parameters: burn's [`Gradients`], which `backward` returns, or
/// [`GradientsParams`], which optimizers take.
pub trait Grads: sealed::Sealed {}

impl<T: sealed::Sealed> Grads for T {}

mod sealed {
    use super::{Param, Tensor};

    pub trait Sealed {
        /// Returns the gradient of the parameter's base; `None` if it has none.
        fn of<const D: usize>(&self, param: &Param<Tensor<D>>) -> Option<Tensor<D>>;
    }
}

impl sealed::Sealed for Gradients {
    fn of<const D: usize>(&self, param: &Param<Tensor<D>>) -> Option<Tensor<D>> {
        param.base().grad(self)
    }
}

impl sealed::Sealed for GradientsParams {
    fn of<const D: usize>(&self, param: &Param<Tensor<D>>) -> Option<Tensor<D>> {
        self.get(param.id)
    }
}

impl Reparameterization for DistributedParameter {
    const NAME: &'static str = "distributed";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let unsharded = value(self, base).or_unwind();
        match &self.adapter {
            None => unsharded,
            Some(adapter) => adapter.apply(unsharded),
        }
    }
}

/// Returns the full weight, without its adapter. It is gathered over the data-parallel ranks, in
/// its unit's open scope or else by itself, and then over the tensor-parallel ranks.
///
/// # Errors
/// The error of the collective over the tensor-parallel ranks.
///
/// # Panics
/// If its unit is not open: like [`unit`](super::unit()).
pub(super) fn value<const D: usize>(
    param: &DistributedParameter,
    base: Tensor<D>,
) -> Result<Tensor<D>> {
    let full = read(param, base.into_dispatch(), |scope, position| {
        if let Some(full) = scope.read[position].full.get() {
            return Ok(full.clone());
        }
        let value = scope.value(position);
        let full = match param.tensor_spec(value.dtype()) {
            None => value,
            Some(spec) => {
                let placed = DTensor::from_parts(Tensor::<D>::from_dispatch(value), spec);
                unshard_placed(
                    placed,
                    &param
                        .info()
                        .parallel
                        .as_ref()
                        .expect("it is parallelized")
                        .data_dims,
                )?
                .into_dispatch()
            }
        };
        Ok::<_, Error>(scope.read[position].full.get_or_init(|| full).clone())
    })?;
    Ok(Tensor::from_dispatch(full))
}

/// Gathers a weight over its tensor-parallel mesh. Ranks along `data_dims` have distinct data, so
/// that their gradients of the weight are partial sums.
fn unshard_placed<const D: usize>(placed: DTensor<D>, data_dims: &[usize]) -> Result<Tensor<D>> {
    if data_dims.is_empty() {
        return placed.full_tensor();
    }
    let layout = placed
        .layout()
        .replaced(|dim, own| match data_dims.contains(&dim) {
            true => Placement::Replicate,
            false => own,
        })?;
    let spec = DTensorSpec::new(placed.mesh(), layout, placed.shape(), placed.dtype())?;
    DTensor::from_parts(placed.all_gather_varying(data_dims)?, spec.shared()).full_tensor()
}

/// Returns the weight on its tensor-parallel mesh, gathered over the data-parallel ranks, or `None`
/// if it was not parallelized.
fn dtensor_of<const D: usize>(param: &DistributedParameter, base: Tensor<D>) -> Option<DTensor<D>> {
    let placed = &param.info().parallel.as_ref()?.spec;
    let replicated: Vec<usize> = (0..placed.mesh().ndim())
        .filter(|&dim| placed.placements()[dim].is_replicate())
        .collect();
    let (local, varying) = read(param, base.into_dispatch(), |scope, position| {
        let varying = (!replicated.is_empty())
            .then(|| scope.varying(position))
            .flatten();
        (scope.value(position), varying)
    });
    let spec = param.tensor_spec(local.dtype())?;
    let dtensor = DTensor::from_parts(Tensor::from_dispatch(local), spec);
    Some(match varying {
        None => dtensor,
        Some(varying) => dtensor.with_varied(
            &replicated,
            Arc::new(move |dims| Tensor::from_dispatch(varying.get(dims))),
        ),
    })
}

/// Reads a parameter with `f`: in its unit's open scope, or in a scope opened for this read. `f`
/// receives the scope and the parameter's position in it.
fn read<T>(
    param: &DistributedParameter,
    base: DispatchTensor,
    f: impl FnOnce(&ForwardScope, usize) -> T,
) -> T {
    let position = |shards: &LocalShards| shards.position(param.index, &base);
    let open = unit_stack::find(|scope| {
        let position = scope
            .is_of(&param.unit)
            .then(|| position(&scope.shards))??;
        Some((scope.clone(), position))
    });
    if let Some((scope, position)) = open {
        return f(&scope, position);
    }
    // The unit stays open until another unit is read, or the module around it is left.
    if let Some(shards) = unit_stack::inside(&param.unit, |shards| position(shards).is_some()) {
        let (scope, ()) = pre_forward(
            &param.unit,
            shards,
            UnitAccess::Read,
            (),
            unit_stack::open_by_read,
        );
        return f(
            &scope,
            position(&scope.shards).expect("the scope was opened for these shards"),
        );
    }
    // On backends other than Flex, an untracked shard cannot be matched with the open unit. So a
    // read while the unit is open is never reported.
    if unit_stack::find(|scope| scope.is_of(&param.unit).then_some(())).is_none() {
        note_read_outside(&param.unit, param.index);
    }
    if !unit_stack::is_any() {
        sweep(std::iter::once(&param.unit));
    }
    let access = UnitAccess::LoneRead(format!("{} (outside its unit)", param.info().path).into());
    let shards = LocalShards::new([(param.index, param.state.clone(), base)]);
    let (scope, ()) =
        ForwardScope::open(&param.unit, shards, access, unit_stack::enclosing(), ()).or_unwind();
    unit_stack::follow(&scope);
    if !scope.is_recomputed {
        scope.pass.begin();
    }
    let result = f(&scope, 0);
    scope.close(true);
    result
}

/// Gathers a parameter over the data-parallel ranks, in the element type in which it is stored.
///
/// # Errors
/// The error of the all-gather.
pub(super) fn stored<const D: usize>(
    param: &DistributedParameter,
    base: Tensor<D>,
) -> Result<Tensor<D>> {
    // Without autodiff: burn's graph would otherwise keep the shard alive until a backward.
    let base = base.inner();
    let shards = LocalShards::new([(
        param.index,
        param.state.clone(),
        base.clone().into_dispatch(),
    )]);
    let _open = open_gathered(&param.unit, shards)?;
    value(param, base)
}

/// Gathers parameters of a unit in the element types in which they are stored, and opens the unit
/// until the returned guard is dropped. No backward follows.
///
/// # Errors
/// Those of [`ForwardScope::open`], and of the all-gather.
pub(super) fn open_gathered(unit: &Arc<Unit>, shards: LocalShards) -> Result<UnitGuard> {
    let (scope, ()) = ForwardScope::open(
        unit,
        shards,
        UnitAccess::Stored,
        unit_stack::enclosing(),
        (),
    )?;
    scope.pass.unsharded.gather()?;
    scope.pass.begin();
    Ok(UnitGuard::new(Some(scope), Vec::new()))
}
