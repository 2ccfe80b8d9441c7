//! [`clip_grad_norm`].

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

use super::visit::sharded_parameters;
use crate::Result;
use crate::comm::{Call, Communicator, ReduceOp};

/// The norm [`clip_grad_norm`] measures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormType {
    /// The p-norm, for any finite p; p = 0 counts the elements that are not zero.
    P(f64),
    /// The largest magnitude.
    Inf,
}

impl NormType {
    /// The sum of magnitudes.
    pub const L1: Self = Self::P(1.0);
    /// The Euclidean norm.
    pub const L2: Self = Self::P(2.0);
}

/// Scales all gradients down so that their joint norm is at most `max_norm`; returns the norm
/// before scaling, equal on every rank.
///
/// The norm is that of the unsharded gradients, whatever each parameter's placement: sharded
/// parameters are summed over the ranks that hold their pieces, once a mesh; parameters that every
/// rank holds whole count once. Gradients of ignored parameters count as this rank has them: reduce
/// them first, or norm and scale differ from rank to rank.
///
/// # Collective
/// Every rank of the model's meshes must call it. One all-reduce of one number a mesh.
///
/// # Errors
/// [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn clip_grad_norm<M: Module>(model: &M, grads: &mut GradientsParams, max_norm: f64, norm: NormType) -> Result<f64> {
    let cut = sharded_parameters(model).into_iter().filter(|param| param.sharded.info().dim.is_some());
    let groups = cut.map(|param| (param.id, param.sharded.unit.shard.clone()));
    let mut measure = Measure { norm, grads, groups: groups.collect(), local: 0.0, parts: Vec::new() };
    model.visit(&mut measure);
    let Measure { local, parts, .. } = measure;
    let mut total = local;
    let device = model.devices().into_iter().next().unwrap_or_default().inner();
    for (group, part) in parts {
        let part = Tensor::<1>::from_data([part as f32], &device).into_dispatch();
        let op = match norm {
            NormType::P(_) => ReduceOp::Sum,
            NormType::Inf => ReduceOp::Max,
        };
        let reduced = group.all_reduce(Call::new("clip_grad_norm"), vec![part], op).wait()?;
        let reduced = reduced.into_iter().next().expect("an all-reduce returns every tensor");
        total = norm.join(total, Tensor::<1>::from_dispatch(reduced).into_scalar::<f32>() as f64);
    }
    let total = norm.finish(total);
    let scale = max_norm / (total + 1e-6);
    if scale < 1.0 {
        model.visit(&mut Scale { grads, scale });
    }
    Ok(total)
}

impl NormType {
    /// The part of the norm in one tensor, still to be joined and finished.
    fn of<const D: usize>(self, tensor: Tensor<D>) -> f64 {
        if tensor.shape().num_elements() == 0 {
            return 0.0;
        }
        let magnitude = tensor.cast(DType::F32).abs();
        let part = match self {
            Self::P(0.0) => magnitude.not_equal_elem(0.0).float().sum(),
            Self::P(1.0) => magnitude.sum(),
            Self::P(2.0) => (magnitude.clone() * magnitude).sum(),
            Self::P(p) => magnitude.powf_scalar(p as f32).sum(),
            Self::Inf => magnitude.max(),
        };
        part.into_scalar::<f32>() as f64
    }

    fn join(self, a: f64, b: f64) -> f64 {
        match self {
            Self::P(_) => a + b,
            // `f64::max` would drop a NaN.
            Self::Inf => {
                if a.is_nan() || a > b {
                    a
                } else {
                    b
                }
            }
        }
    }

    fn finish(self, total: f64) -> f64 {
        match self {
            Self::P(0.0) | Self::Inf => total,
            Self::P(p) => total.powf(1.0 / p),
        }
    }
}

type Group = Arc<dyn Communicator>;

struct Measure<'a> {
    norm: NormType,
    grads: &'a GradientsParams,
    groups: std::collections::HashMap<burn::module::ParamId, Group>,
    local: f64,
    /// One part of the norm for each group of ranks that shares pieces.
    parts: Vec<(Group, f64)>,
}

impl ModuleVisitor for Measure<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // A rank whose piece is empty, or who has no gradient, still takes part in the reduction.
        let part = self.grads.get::<D>(param.id).map_or(0.0, |grad| self.norm.of(grad));
        let Some(group) = self.groups.get(&param.id) else {
            self.local = self.norm.join(self.local, part);
            return;
        };
        match self.parts.iter_mut().find(|(other, _)| Arc::ptr_eq(other, group)) {
            Some((_, sum)) => *sum = self.norm.join(*sum, part),
            None => self.parts.push((group.clone(), part)),
        }
    }
}

struct Scale<'a> {
    grads: &'a mut GradientsParams,
    scale: f64,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad * self.scale);
        }
    }
}
