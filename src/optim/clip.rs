//! Gradient clipping by norm, per parameter as in burn. The norm of a sharded gradient is that of all its shards.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Tensor};

use super::route::Route;
use crate::Result;
use crate::comm::{Call, ReduceOp};
use crate::dtensor::DTensorSpec;
use crate::param::Unit;

/// Maximum gradient norm of each parameter, and the parameter's spec if it is distributed.
pub(super) type Bounds = HashMap<ParamId, (f32, Option<Arc<DTensorSpec>>)>;

/// Scales down each gradient of the model so that its norm does not exceed its bound. `units` are the model's
/// units. The norms stay on the device: the host does not wait for them.
///
/// # Collective
/// Every rank of the parameters' meshes. The gradients are grouped by the set of mesh dimensions that shard the
/// parameter, with gradients in double precision apart. Each group takes one all-reduce along each of its mesh
/// dimensions, with one number per gradient.
pub(super) fn clip_each<M: Module>(
    model: &M,
    grads: &mut GradientsParams,
    bounds: &Bounds,
    units: &[Arc<Unit>],
) -> Result<()> {
    let mut measure = GroupNormVisitor { grads, bounds, sums: Vec::new(), faults: None };
    model.visit(&mut measure);
    let GroupNormVisitor { sums, faults, .. } = measure;
    faults.map_or(Ok(()), Err)?;
    let mut factors = HashMap::new();
    for Sums { route, ids, squares } in sums {
        let mut squares = Tensor::cat(squares, 0);
        for axis in 0..route.iter().map(Route::axes).sum() {
            let communicator = route.as_ref().expect("only a distributed parameter has axes").communicator(axis);
            let call = Call { model: Unit::model_over(units, communicator), ..Call::new("clip") };
            let reduced = communicator.all_reduce(call, vec![squares.into_dispatch()], ReduceOp::Sum);
            squares = reduced.single()?;
        }
        let norms = squares.sqrt();
        for (at, id) in ids.into_iter().enumerate() {
            let norm = norms.clone().narrow(0, at, 1);
            // Like burn, adds the smallest positive number, so that a norm of zero does not divide by zero.
            let smallest = norm.dtype().finfo().unwrap_or(FloatDType::F32.finfo()).min_positive;
            factors.insert(id, norm.add_scalar(smallest).recip().mul_scalar(bounds[&id].0).clamp_max(1.0));
        }
    }
    model.visit(&mut GroupScaleVisitor { grads, factors });
    Ok(())
}

/// Sums of squares of this rank's shards, for gradients whose parameters are laid out identically.
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
    fn sums(&mut self, spec: Option<DTensorSpec>, dtype: DType) -> Result<&mut Sums> {
        let like = |sums: &Sums| match (&sums.route, &spec) {
            (Some(route), Some(spec)) => route.takes(spec),
            (None, None) => sums.squares[0].dtype() == dtype,
            _ => false,
        };
        let at = match self.sums.iter().position(like) {
            Some(at) => at,
            None => {
                let route = spec.map(|spec| Route::of(&spec)).transpose()?;
                self.sums.push(Sums { route, ids: Vec::new(), squares: Vec::new() });
                self.sums.len() - 1
            }
        };
        Ok(&mut self.sums[at])
    }
}

impl ModuleVisitor for GroupNormVisitor<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some((_, spec)) = self.bounds.get(&param.id) else { return };
        let Some(grad) = self.grads.get::<D>(param.id) else { return };
        let dtype = if grad.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let square = match grad.shape().num_elements() {
            0 => Tensor::zeros([1], (&grad.device(), dtype)),
            _ => grad.cast(dtype).square().sum(),
        };
        let spec = spec.as_ref().map(|spec| spec.with_dtype(dtype));
        match self.sums(spec, dtype) {
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
        let Some(factor) = self.factors.get(&param.id) else { return };
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            let dtype = grad.dtype();
            let clipped = grad.cast(factor.dtype()).mul(factor.clone().unsqueeze()).cast(dtype);
            self.grads.register(param.id, clipped);
        }
    }
}
