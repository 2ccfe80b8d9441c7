//! [`check_reduced`]: finds a step without the gradients that wait in a unit.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::ParamError;
use super::visit::Walk;

/// Checks that `grads` has the gradient of a distributed parameter of `model`, if gradients wait in
/// a unit of it. `walk` is that of the model.
///
/// Local. All ranks of a unit postpone the same reductions, and none of them has gradients before
/// the reduction, so they decide identically.
///
/// # Errors
/// [`ParamError::StepWithoutGradients`].
pub(crate) fn check_reduced<M: Module>(
    model: &M,
    walk: &Walk,
    grads: &GradientsParams,
) -> Result<(), ParamError> {
    let Some(pending) = walk
        .distributed
        .iter()
        .find(|visited| visited.param.unit.accumulated.is_any())
    else {
        return Ok(());
    };
    let distributed = walk.distributed.iter().map(|visited| visited.id).collect();
    let mut search = GradSearch {
        distributed,
        grads,
        is_found: false,
    };
    model.visit(&mut search);
    if search.is_found {
        return Ok(());
    }
    Err(ParamError::StepWithoutGradients {
        unit: pending.param.unit.label().to_string(),
    })
}

/// Visitor that searches for a gradient of one of these parameters.
struct GradSearch<'a> {
    distributed: HashSet<ParamId>,
    grads: &'a GradientsParams,
    is_found: bool,
}

impl ModuleVisitor for GradSearch<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.is_found |=
            self.distributed.contains(&param.id) && self.grads.get::<D>(param.id).is_some();
    }
}
