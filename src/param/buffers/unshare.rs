//! [`unshared`]: returns a model whose buffers no clone shares.

use std::any::Any;
use std::collections::VecDeque;

use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId, Parameter, ParameterValue};
use burn::tensor::{Bool, Int, Shape, Tensor};

use crate::Result;
use crate::param::ParamError;
use crate::param::model_scan::ModelScan;
use crate::param::states::copying;

/// Returns the model with private buffers. Everything else is unchanged, including lazy parameters.
///
/// In burn, only the transition to validation or training creates a new `RunningState` from an existing one. So a
/// copy of the model goes through [`valid`](Module::valid), which also applies the updates that a thread has
/// postponed. Then everything that a mapper visits is restored: parameters with their ids, gradients, mappers and
/// training state, flags, and the autodiff state of the statistics. One effect of the transition remains: plain
/// tensors in fields are no longer on an autodiff device. Operations treat them as constants.
///
/// # Errors
/// [`ParamError::ParamNotVisited`] for a parameter that the model's `map` does not visit as its `visit` does.
pub(crate) fn unshared<M: Module>(model: M) -> Result<M> {
    if !ModelScan::of(&model).has_running() {
        return Ok(model);
    }
    let fresh = settled(&model);
    let mut kept = SavedParams::default();
    model.visit(&mut kept);
    let mut restore = RestoreParams { kept: kept.params, path: Vec::new(), failed: None };
    let model = copying(|| fresh.map(&mut restore));
    match (restore.failed, restore.kept.pop_front()) {
        (None, None) => Ok(model),
        (Some(param), _) => Err(ParamError::ParamNotVisited { param }.into()),
        (None, Some((id, _))) => Err(ParamError::ParamNotVisited { param: format!("id {id}") }.into()),
    }
}

/// Returns the model in validation, with private buffers. Lazy parameters are replaced by empty tensors, so nothing
/// is initialized.
///
/// Updates of statistics that a thread has postponed are applied now, in `model` too.
pub(in crate::param) fn settled<M: Module>(model: &M) -> M {
    copying(|| model.clone().map(&mut WithoutLazy)).valid()
}

/// Replaces lazy parameters, which `valid` would initialize, by empty tensors.
struct WithoutLazy;

impl WithoutLazy {
    fn map<T: Parameter>(param: Param<T>, empty: impl FnOnce(&Param<T>) -> T) -> Param<T> {
        match param.is_initialized() {
            true => param,
            false => Param::initialized(param.id, empty(&param)),
        }
    }
}

impl ModuleMapper for WithoutLazy {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        Self::map(param, |param| Tensor::empty(Shape::from([0; D]), &param.lazy_device()))
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        Self::map(param, |param| Tensor::empty(Shape::from([0; D]), &param.lazy_device()))
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        Self::map(param, |param| Tensor::empty(Shape::from([0; D]), &param.lazy_device()))
    }
}

/// All parameters and flags of a model, in burn's order.
#[derive(Default)]
struct SavedParams {
    params: VecDeque<(ParamId, Box<dyn Any>)>,
}

impl SavedParams {
    fn keep<T: ParameterValue + 'static>(&mut self, param: &Param<T>) {
        self.params.push_back((param.id, Box::new(param.clone())));
    }
}

impl ModuleVisitor for SavedParams {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.keep(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.keep(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.keep(param);
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.keep(flag);
    }
}

/// Restores the saved parameters and flags.
struct RestoreParams {
    kept: VecDeque<(ParamId, Box<dyn Any>)>,
    path: Vec<String>,
    /// Path of the first parameter that `visit` did not save in this position.
    failed: Option<String>,
}

impl RestoreParams {
    fn restore<T: ParameterValue + 'static>(&mut self, param: Param<T>) -> Param<T> {
        let kept = self.kept.pop_front().filter(|(id, _)| *id == param.id);
        match kept.and_then(|(_, kept)| kept.downcast::<Param<T>>().ok()) {
            Some(kept) => *kept,
            None => {
                self.failed.get_or_insert_with(|| self.path.join("."));
                param
            }
        }
    }
}

impl ModuleMapper for RestoreParams {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.restore(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.restore(param)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        self.restore(param)
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.restore(flag)
    }
}
