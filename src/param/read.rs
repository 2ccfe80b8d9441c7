//! Reading a distributed parameter: in the open scope of its unit, or in a scope opened for this parameter alone.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::Reparameterization;
use burn::tensor::Tensor;

use super::distributed::DistributedParameter;
use super::prefetch::prefetch;
use super::scope::{ForwardScope, ScopeOptions, sweep_passes};
use super::shards::LocalShards;
use super::unit::{Kept, Unit};
use super::unit_stack::{self, UnitGuard};
use crate::dtensor::{DTensor, DTensorSpec};
use crate::error::OrUnwind;
use crate::placement::Placement;
use crate::{Error, Result};

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

/// Returns the full weight, without its adapter. It is gathered over the data-parallel ranks, in its unit's open
/// scope or else by itself, and then over the tensor-parallel ranks.
///
/// # Errors
/// The error of the collective over the tensor-parallel ranks.
///
/// # Panics
/// If its unit is not open: like [`unit`](super::unit()).
pub(super) fn value<const D: usize>(param: &DistributedParameter, base: Tensor<D>) -> Result<Tensor<D>> {
    let full = read(param, base.into_dispatch(), |scope, position| {
        if let Some(full) = scope.read[position].full.get() {
            return Ok(full.clone());
        }
        let value = scope.value(position);
        let full = match param.tensor_spec(value.dtype()) {
            None => value,
            Some(spec) => {
                let placed = DTensor::from_parts(Tensor::<D>::from_dispatch(value), spec);
                unshard_placed(placed, &param.info().parallel.as_ref().expect("it is parallelized").data_dims)?
                    .into_dispatch()
            }
        };
        Ok::<_, Error>(scope.read[position].full.get_or_init(|| full).clone())
    })?;
    Ok(Tensor::from_dispatch(full))
}

/// Gathers a weight over its tensor-parallel mesh. Ranks along `data_dims` have distinct data, so that their
/// gradients of the weight are partial sums.
fn unshard_placed<const D: usize>(placed: DTensor<D>, data_dims: &[usize]) -> Result<Tensor<D>> {
    if data_dims.is_empty() {
        return placed.full_tensor();
    }
    let layout = placed.layout().replaced(|dim, own| match data_dims.contains(&dim) {
        true => Placement::Replicate,
        false => own,
    })?;
    let spec = DTensorSpec::new(placed.mesh(), layout, placed.shape(), placed.dtype())?;
    DTensor::from_parts(placed.all_gather_varying(data_dims)?, spec.shared()).full_tensor()
}

/// Returns the weight on its tensor-parallel mesh, gathered over the data-parallel ranks, or `None` if it was not
/// parallelized.
pub(super) fn dtensor<const D: usize>(param: &DistributedParameter, base: Tensor<D>) -> Option<DTensor<D>> {
    let placed = &param.info().parallel.as_ref()?.spec;
    let replicated: Vec<usize> =
        (0..placed.mesh().ndim()).filter(|&dim| placed.placements()[dim].is_replicate()).collect();
    let (local, varying) = read(param, base.into_dispatch(), |scope, position| {
        let varying = (!replicated.is_empty()).then(|| scope.varying(position)).flatten();
        (scope.value(position), varying)
    });
    let spec = param.tensor_spec(local.dtype())?;
    let dtensor = DTensor::from_parts(Tensor::from_dispatch(local), spec);
    Some(match varying {
        None => dtensor,
        Some(varying) => {
            dtensor.with_varied(&replicated, Arc::new(move |dims| Tensor::from_dispatch(varying.get(dims))))
        }
    })
}

/// Reads a parameter with `f`: in its unit's open scope, or in a scope opened for this read. `f` receives the scope
/// and the parameter's position in it.
fn read<T>(param: &DistributedParameter, base: DispatchTensor, f: impl FnOnce(&ForwardScope, usize) -> T) -> T {
    let open = unit_stack::find(|scope| {
        let same = Arc::ptr_eq(scope.pass.buffer.unit(), &param.unit);
        let position = same.then(|| scope.shards.position(param.index, &base))??;
        Some((scope.clone(), position))
    });
    if let Some((scope, position)) = open {
        return f(&scope, position);
    }
    let position = |shards: &LocalShards| shards.position(param.index, &base);
    if let Some(scope) = unit_stack::by_read(&param.unit, |shards| position(shards).is_some()) {
        if !scope.again {
            prefetch(&param.unit);
            scope.pass.begin();
        }
        return f(&scope, position(&scope.shards).expect("the scope was opened for these shards"));
    }
    // On backends other than Flex, an untracked shard cannot be matched with the open unit. So a read while the
    // unit is open is never reported.
    if unit_stack::find(|scope| Arc::ptr_eq(scope.pass.buffer.unit(), &param.unit).then_some(())).is_none() {
        param.unit.read_outside(param.index);
    }
    if !unit_stack::is_any() {
        sweep_passes(std::iter::once(&param.unit));
    }
    let kept = match param.unit.kept() {
        Kept::Part => Kept::Shard,
        kept => kept,
    };
    let label = format!("{} (outside its unit)", param.info().path).into();
    let opening = ScopeOptions { kept, lone: true, label, ..unit_stack::opening(&param.unit) };
    let (scope, ()) =
        ForwardScope::open(&param.unit, LocalShards::one(param.index, param.state.clone(), base), opening, ())
            .or_unwind();
    unit_stack::follow(&scope);
    if !scope.again {
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
pub(super) fn stored<const D: usize>(param: &DistributedParameter, base: Tensor<D>) -> Result<Tensor<D>> {
    // Without autodiff: burn's graph would otherwise keep the shard alive until a backward.
    let base = base.inner();
    let _open =
        open_gathered(&param.unit, LocalShards::one(param.index, param.state.clone(), base.clone().into_dispatch()))?;
    value(param, base)
}

/// Gathers parameters of a unit in the element types in which they are stored, and opens the unit until the
/// returned guard is dropped. No backward follows.
///
/// # Errors
/// Those of [`ForwardScope::open`], and of the all-gather.
pub(super) fn open_gathered(unit: &Arc<Unit>, shards: LocalShards) -> Result<UnitGuard> {
    let opening =
        ScopeOptions { stored: true, kept: Kept::Shard, tracked: false, earlier: None, ..unit_stack::opening(unit) };
    let (scope, ()) = ForwardScope::open(unit, shards, opening, ())?;
    scope.pass.buffer.gather()?;
    scope.pass.begin();
    Ok(UnitGuard::new(Some(scope), Vec::new()))
}
