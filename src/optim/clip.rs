//! Gradient clipping by norm, per parameter as in burn. The norm of a sharded gradient is that of
//! all its shards.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor};

use super::route::Route;
use crate::Result;
use crate::comm::{Call, ReduceOp};
use crate::dtensor::DTensorSpec;
use crate::param::Unit;

/// Maximum gradient norm of each parameter, and the parameter's spec if it is distributed.
pub(super) type Bounds = HashMap<ParamId, (f32, Option<Arc<DTensorSpec>>)>;

/// Scales down each gradient of the model so that its norm does not exceed its bound. `units` are
/// the model's units. The norms stay on the device: the host does not wait for them.
///
/// # Collective
/// Every rank of the parameters' meshes. The gradients are grouped by the set of mesh dimensions
/// that shard the parameter, with gradients in double precision and in host memory apart. Each
/// group takes one all-reduce along each of its mesh dimensions, with one number per gradient.
pub(super) fn clip_each<M: Module>(
    model: &M,
    grads: &mut GradientsParams,
    bounds: &Bounds,
    units: &[Arc<Unit>],
) -> Result<()> {
    let mut measure = GroupNormVisitor {
        grads,
        bounds,
        sums: Vec::new(),
        faults: None,
    };
    model.visit(&mut measure);
    let GroupNormVisitor { sums, faults, .. } = measure;
    faults.map_or(Ok(()), Err)?;
    let mut factors = HashMap::new();
    for Sums {
        route,
        ids,
        squares,
    } in sums
    {
        let norms = norms(Tensor::cat(squares, 0), route.as_ref(), units)?;
        for (at, id) in ids.into_iter().enumerate() {
            factors.insert(id, factor(norms.clone().narrow(0, at, 1), bounds[&id].0));
        }
    }
    model.visit(&mut GroupScaleVisitor { grads, factors });
    Ok(())
}

/// Scales down the gradient of one parameter so that its norm does not exceed `max_norm`. `spec` is
/// the parameter's spec if it is distributed.
///
/// # Collective
/// Every rank of the parameter's mesh: one all-reduce along each mesh dimension that shards the
/// parameter.
pub(super) fn clip_one<const D: usize>(
    grad: Tensor<D>,
    max_norm: f32,
    spec: Option<&DTensorSpec>,
) -> Result<Tensor<D>> {
    let square = square(grad.clone());
    let route = spec
        .map(|spec| Route::of(&spec.with_dtype(square.dtype())))
        .transpose()?;
    Ok(scaled(
        grad,
        &factor(norms(square, route.as_ref(), &[])?, max_norm),
    ))
}

/// Returns the norms of full gradients from the sums of squares of this rank's shards.
fn norms(mut squares: Tensor<1>, route: Option<&Route>, units: &[Arc<Unit>]) -> Result<Tensor<1>> {
    for (route, axis) in route
        .into_iter()
        .flat_map(|route| (0..route.axes()).map(move |axis| (route, axis)))
    {
        let communicator = route.communicator(axis);
        let call = Call {
            model: Unit::model_over(units.iter().map(AsRef::as_ref), communicator),
            ..Call::new("clip")
        };
        squares = communicator
            .all_reduce(call, vec![squares.into_dispatch()], ReduceOp::Sum)
            .single()?;
    }
    Ok(squares.sqrt())
}

/// Returns the sum of squares of a shard, of shape `[1]`.
fn square<const D: usize>(grad: Tensor<D>) -> Tensor<1> {
    let dtype = if grad.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    match grad.shape().num_elements() {
        0 => Tensor::zeros([1], (&grad.device(), dtype)),
        _ => grad.cast(dtype).square().sum(),
    }
}

/// Returns the factor by which a gradient of this norm is scaled.
fn factor(norm: Tensor<1>, max_norm: f32) -> Tensor<1> {
    // Like burn, adds the smallest positive number, so that a norm of zero does not divide by zero.
    let smallest = norm
        .dtype()
        .finfo()
        .unwrap_or(FloatDType::F32.finfo())
        .min_positive;
    norm.add_scalar(smallest)
        .recip()
        .mul_scalar(max_norm)
        .clamp_max(1.0)
}

fn scaled<const D: usize>(grad: Tensor<D>, factor: &Tensor<1>) -> Tensor<D> {
    let dtype = grad.dtype();
    grad.cast(factor.dtype())
        .mul(factor.clone().unsqueeze())
        .cast(dtype)
}

/// Sums of squares of this rank's shards, for gradients on one device whose parameters are laid out
/// identically.
struct Sums {
    /// Route of the parameters; `None` for parameters that are not distributed.
    route: Option<Route>,
    ids: Vec<ParamId>,
    squares: Vec<Tensor<1>>,
}

struct GroupNormVisitor<'a> {
    grads: &'a GradientsParams,
    bounds: &'a Bounds,
    sums: Vec<Sums>,
    faults: Option<crate::Error>,
}

impl GroupNormVisitor<'_> {
    /// Returns the sums to which the one of a gradient on `device` belongs.
    fn sums(
        &mut self,
        spec: Option<DTensorSpec>,
        dtype: DType,
        device: &Device,
    ) -> Result<&mut Sums> {
        let like = |sums: &Sums| {
            let is_same = match (&sums.route, &spec) {
                (Some(route), Some(spec)) => route.takes(spec),
                (None, None) => sums.squares[0].dtype() == dtype,
                _ => false,
            };
            is_same && sums.squares[0].device() == *device
        };
        let at = match self.sums.iter().position(like) {
            Some(at) => at,
            None => {
                let route = spec.map(|spec| Route::of(&spec)).transpose()?;
                self.sums.push(Sums {
                    route,
                    ids: Vec::new(),
                    squares: Vec::new(),
                });
                self.sums.len() - 1
            }
        };
        Ok(&mut self.sums[at])
    }
}

impl ModuleVisitor for GroupNormVisitor<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some((_, spec)) = self.bounds.get(&param.id) else {
            return;
        };
        let Some(grad) = self.grads.get::<D>(param.id) else {
            return;
        };
        let square = square(grad);
        let dtype = square.dtype();
        let spec = spec.as_ref().map(|spec| spec.with_dtype(dtype));
        match self.sums(spec, dtype, &square.device()) {
            Ok(sums) => {
                sums.ids.push(param.id);
                sums.squares.push(square);
            }
            Err(fault) => self.faults = Some(fault),
        }
    }
}

struct GroupScaleVisitor<'a> {
    grads: &'a mut GradientsParams,
    factors: HashMap<ParamId, Tensor<1>>,
}

impl ModuleVisitor for GroupScaleVisitor<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(factor) = self.factors.remove(&param.id) else {
            return;
        };
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, scaled(grad, &factor));
        }
    }
}
