//! Running statistics: [`marked`] tells them from parameters, and [`renewed`] gives a model its
//! own.
//!
//! # What it relies on
//! * burn shows a `RunningState` to visitors and mappers as a float parameter, but a
//!   reparameterization that is applied to a module stays only at real parameters.
//! * Clones of a model share a `RunningState`, which a forward writes in place. Only the transition
//!   to validation or training creates a new one from an existing one. It also applies the updates
//!   that a thread has postponed.
//!
//! # The issue to file
//! *A visitor method for running state, and a way to copy it.* `ModuleVisitor::visit_running_state`
//! would tell statistics from parameters, and `RunningState::detached_copy` would copy them without
//! a transition of the module.

use std::any::Any;
use std::collections::VecDeque;

use burn::module::{
    Flag, Module, Param, ParamId, Parameter, ParameterValue, Reparameterization, Reparameterizer,
};
use burn::tensor::{Shape, Tensor};

use super::visitor::{ModulePath, TensorMapper, TensorVisitor, map_tensors, visit_tensors};
use crate::dtensor::Kind;

/// Name of the reparameterization that [`marked`] attaches.
pub(crate) const MARK: &str = Marker::NAME;

/// Returns a clone of `model` in which every float parameter has a reparameterization named
/// [`MARK`] unless it has another one. Running statistics have none.
pub(crate) fn marked<M: Module>(model: &M) -> M {
    model.clone().apply_reparameterization(Marker)
}

/// Marker for parameters.
#[derive(Module, Debug)]
struct Marker;

impl Reparameterization for Marker {
    const NAME: &'static str = "parameter";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base
    }
}

impl Reparameterizer for Marker {
    type Reparam = Marker;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Marker>) {
        (param, Some(Marker))
    }
}

/// Returns the model with running statistics that no clone shares. Everything else is unchanged,
/// including lazy parameters.
///
/// A copy of the model goes through [`valid`](Module::valid). Then everything that a mapper visits
/// is restored: parameters with their ids, gradients, mappers and training state, flags, and the
/// autodiff state of the statistics. One effect of the transition remains: plain tensors in fields
/// are no longer on an autodiff device. Operations treat them as constants.
///
/// # Errors
/// The path or id of a parameter that the model's `map` does not visit as its `visit` does.
pub(crate) fn renewed<M: Module>(model: M) -> Result<M, String> {
    let fresh = settled(&model);
    let mut saved = SavedParams::default();
    visit_tensors(&model, &mut saved);
    let mut restore = RestoreParams {
        saved: saved.0,
        failed: None,
    };
    let model = map_tensors(fresh, &mut restore);
    match (restore.failed, restore.saved.pop_front()) {
        (None, None) => Ok(model),
        (Some(param), _) => Err(param),
        (None, Some((id, _))) => Err(format!("id {id}")),
    }
}

/// Returns the model in validation, with running statistics that no clone shares. Lazy parameters
/// are replaced by empty tensors, so nothing is initialized.
///
/// Updates of statistics that a thread has postponed are applied now, in `model` too.
pub(crate) fn settled<M: Module>(model: &M) -> M {
    map_tensors(model.clone(), &mut WithoutLazy).valid()
}

/// Replaces lazy parameters, which `valid` would initialize, by empty tensors.
struct WithoutLazy;

impl TensorMapper for WithoutLazy {
    fn tensor<const D: usize, K: Kind>(
        &mut self,
        _: &ModulePath,
        param: Param<Tensor<D, K>>,
    ) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        match param.is_initialized() {
            true => param,
            false => Param::initialized(
                param.id,
                Tensor::empty(Shape::from([0; D]), &param.lazy_device()),
            ),
        }
    }
}

/// All parameters and flags of a model, in burn's order.
#[derive(Default)]
struct SavedParams(VecDeque<(ParamId, Box<dyn Any>)>);

impl SavedParams {
    fn save<T: ParameterValue + 'static>(&mut self, param: &Param<T>) {
        self.0.push_back((param.id, Box::new(param.clone())));
    }
}

impl TensorVisitor for SavedParams {
    fn tensor<const D: usize, K: Kind>(&mut self, _: &ModulePath, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        self.save(param);
    }

    fn flag(&mut self, _: &ModulePath, flag: &Param<Flag>) {
        self.save(flag);
    }
}

/// Restores the saved parameters and flags.
struct RestoreParams {
    saved: VecDeque<(ParamId, Box<dyn Any>)>,
    /// Path of the first parameter that `visit` did not save in this position.
    failed: Option<String>,
}

impl RestoreParams {
    fn restore<T: ParameterValue + 'static>(
        &mut self,
        path: &ModulePath,
        param: Param<T>,
    ) -> Param<T> {
        let saved = self.saved.pop_front().filter(|(id, _)| *id == param.id);
        match saved.and_then(|(_, saved)| saved.downcast::<Param<T>>().ok()) {
            Some(saved) => *saved,
            None => {
                self.failed.get_or_insert_with(|| path.join());
                param
            }
        }
    }
}

impl TensorMapper for RestoreParams {
    fn tensor<const D: usize, K: Kind>(
        &mut self,
        path: &ModulePath,
        param: Param<Tensor<D, K>>,
    ) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        self.restore(path, param)
    }

    fn flag(&mut self, path: &ModulePath, flag: Param<Flag>) -> Param<Flag> {
        self.restore(path, flag)
    }
}

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use burn::nn::{BatchNorm, BatchNormConfig};
    use burn::tensor::Device;

    use super::*;

    #[derive(Default)]
    struct Marks(Vec<String>);

    impl TensorVisitor for Marks {
        fn enter(&mut self, path: &ModulePath) {
            if path.last().is_some_and(|(name, _)| name == MARK) {
                self.0.push(path.join());
            }
        }
    }

    #[test]
    fn running_statistics_keep_no_reparameterization_and_a_renewed_model_has_its_own() {
        let device = Device::flex().autodiff();
        let norm: BatchNorm = BatchNormConfig::new(1).init(&device);
        let mut marks = Marks::default();
        visit_tensors(&marked(&norm), &mut marks);
        assert_eq!(marks.0, ["gamma.parameter", "beta.parameter"]);

        let shared = norm.clone();
        let own = renewed(norm.clone()).unwrap();
        norm.forward(Tensor::<2>::from_data([[0.0], [2.0]], &device));
        let mean = |norm: &BatchNorm| norm.valid().running_mean.value().into_scalar::<f32>();
        assert_eq!([mean(&norm), mean(&shared), mean(&own)], [0.1, 0.1, 0.0]);
        assert_eq!(
            (own.gamma.id, own.gamma.is_require_grad()),
            (norm.gamma.id, true)
        );
    }
}
