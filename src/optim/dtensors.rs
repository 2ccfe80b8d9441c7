//! [`DTensorOptimizer`]: burn's optimizers for DTensors without a module.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::optim::{
    Adafactor, DynOptimizer, DynState, Lamb, LearningRate, Muon, Optimizer, StateSink, StateSource,
};
use burn::tensor::Tensor;

use super::state::{ParameterState, StateFields, describe, layout_error};
use super::{OptimError, OptimizerState};
use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec};
use crate::param::stored_like;

/// burn optimizer for parameters that are [`DTensor`]s outside a module. It identifies each
/// parameter by its path.
///
/// | optimizer | a step | state |
/// |---|---|---|
/// | `Sgd`, `Adam`, `AdamW`, `AdaGrad`, `RmsProp`, `Adan`, `Lion` | steps each rank's local tensor; no communication | sharded like the parameter |
/// | `Lamb`, `Adafactor`, `Muon`, which need the full parameter | all-gathers parameter and gradient, steps them, and keeps this rank's shard of the result | replicated |
///
/// Both give the same numbers as one device. A custom optimizer is assumed to work element by
/// element, unless [`with_full_parameters`](Self::with_full_parameters) is called. burn's `LBFGS`
/// steps a model instead of a parameter and cannot be used here.
///
/// ```
/// use burn::module::Initializer;
/// use burn::optim::AdamWConfig;
/// use burn_dtensor::optim::DTensorOptimizer;
/// use burn_dtensor::prelude::*;
///
/// launch(Launch::threads(2), |world| {
///     let (mesh, rows) = (DeviceMesh::new(world, [2], ["tp"])?, [Placement::Shard(0)]);
///     let device = world.device().clone().autodiff();
///     let normal = Initializer::Normal { mean: 0.0, std: 1.0 };
///     let mut weight = DTensor::<2>::from_initializer(&normal, [4, 3], [4, 3], 1, &mesh, &rows, &device)?.require_grad();
///     let mut optim = DTensorOptimizer::new(AdamWConfig::new().build());
///     for _ in 0..3 {
///         let grads = weight.clone().square().sum().full_tensor()?.backward();
///         let grad = weight.local().grad(&grads).expect("the weight is in the loss");
///         let grad = DTensor::from_local(grad, &mesh, &rows)?;
///         weight = optim.step(1e-2, "weight", weight, grad)?;
///     }
///     let state = optim.state()?;
///     let moment = state.tensor::<2>("weight.momentum.moment_2").expect("AdamW has one");
///     assert_eq!((moment.dims(), moment.placements()), ([4, 3], &rows[..]));
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
pub struct DTensorOptimizer {
    optimizer: Arc<dyn DynOptimizer>,
    is_full: bool,
    states: BTreeMap<String, ParamState>,
}

/// Stored state of one parameter.
struct ParamState {
    /// Spec of the parameter in the last step.
    spec: Arc<DTensorSpec>,
    state: DynState,
}

impl DTensorOptimizer {
    /// Creates the optimizer from a burn optimizer, as the `build` method of its configuration
    /// returns it.
    pub fn new<O: Optimizer>(optimizer: O) -> Self {
        let is_full = [
            TypeId::of::<Lamb>(),
            TypeId::of::<Adafactor>(),
            TypeId::of::<Muon>(),
        ]
        .contains(&TypeId::of::<O>());
        Self {
            optimizer: Arc::new(optimizer),
            is_full,
            states: BTreeMap::new(),
        }
    }

    /// Gathers the full parameter and gradient before each step, for a custom optimizer that does
    /// not work element by element.
    #[must_use]
    pub fn with_full_parameters(mut self) -> Self {
        self.is_full = true;
        self
    }

    /// Steps the parameter with the name `path` by its gradient, which must have the same spec.
    /// Returns the result as a new leaf, which is tracked if the old one was. Do not call it for a
    /// parameter without a gradient: that parameter stays as it is.
    ///
    /// # Collective
    /// Local, except for optimizers that need full parameters: then every rank of the parameter's
    /// mesh must call it.
    ///
    /// # Errors
    /// [`OptimError::Partial`], [`OptimError::Gradient`], and [`OptimError::Layout`] if the
    /// parameter's spec has changed since the last step; [`Error::Comm`](crate::Error::Comm) if a
    /// collective fails.
    pub fn step<const D: usize>(
        &mut self,
        lr: LearningRate,
        path: &str,
        param: DTensor<D>,
        grad: DTensor<D>,
    ) -> Result<DTensor<D>> {
        self.check(path, &param, &grad)?;
        let spec = param.spec().clone();
        let [tensor, grad] = if self.is_full {
            [full_tensor_of(&param)?, full_tensor_of(&grad)?]
        } else {
            [&param, &grad].map(|tensor| tensor.local().clone().inner())
        };
        let state = self.states.remove(path).map(|kept| kept.state);
        let (stepped, state) =
            self.optimizer
                .step_dyn(D, lr, tensor.into_bridge(), grad.into_bridge(), state);
        if let Some(state) = state {
            self.states.insert(
                path.into(),
                ParamState {
                    spec: spec.clone(),
                    state,
                },
            );
        }
        let mut stepped = Tensor::from_bridge(stepped);
        if self.is_full {
            stepped = DTensor::distribute_computed(stepped, spec.mesh(), spec.layout().clone())?
                .to_local();
        }
        Ok(DTensor::from_parts(
            stored_like(param.local(), stepped),
            spec,
        ))
    }

    fn check<const D: usize>(
        &self,
        path: &str,
        param: &DTensor<D>,
        grad: &DTensor<D>,
    ) -> Result<(), OptimError> {
        for (what, layout) in [
            ("the value", param.layout()),
            ("the gradient", grad.layout()),
        ] {
            if layout.has_partial() {
                return Err(OptimError::Partial {
                    path: path.into(),
                    what,
                    layout: layout.to_string(),
                });
            }
        }
        if grad.spec() != param.spec() {
            let gradient = describe(grad.spec());
            let param = describe(param.spec());
            return Err(OptimError::Gradient {
                path: path.into(),
                gradient,
                param,
            });
        }
        match self.states.get(path) {
            Some(ParamState { spec, .. }) if spec != param.spec() => {
                Err(layout_error(path, spec, param.spec()))
            }
            _ => Ok(()),
        }
    }

    /// Returns a copy of the optimizer's state as DTensors. Later steps do not change the copy.
    /// Local: no communication.
    ///
    /// # Errors
    /// [`OptimError::Shape`] for an optimizer that does not work element by element and was created
    /// without [`with_full_parameters`](Self::with_full_parameters).
    pub fn state(&self) -> Result<OptimizerState> {
        let of = |(path, kept): (&String, &ParamState)| {
            let state =
                ParameterState::new(path, &kept.spec, self.flat(&kept.state), self.is_full)?;
            Ok((path.clone(), state))
        };
        Ok(OptimizerState {
            params: self.states.iter().map(of).collect::<Result<_>>()?,
            stateless: BTreeMap::new(),
        })
    }

    /// Replaces the optimizer's state with `state`.
    ///
    /// # Collective
    /// Local, except for optimizers that need full parameters: then every rank of the parameters'
    /// meshes must call it.
    ///
    /// # Errors
    /// [`OptimError::Foreign`] for the state of another optimizer, [`OptimError::Shape`] for a
    /// tensor whose shape differs from that of its sharded parameter, [`OptimError::ElementType`],
    /// and [`Error::Comm`](crate::Error::Comm) if a collective fails. On an error the optimizer
    /// keeps its state.
    pub fn load(&mut self, state: OptimizerState) -> Result<()> {
        let load = |(path, state): (String, ParameterState)| {
            let kept = ParamState {
                spec: state.spec.clone(),
                state: self.loaded(&path, state)?,
            };
            Ok((path, kept))
        };
        self.states = state.params.into_iter().map(load).collect::<Result<_>>()?;
        Ok(())
    }

    fn loaded(&self, path: &str, state: ParameterState) -> Result<DynState> {
        let spec = state.spec.clone();
        let given = match self.is_full {
            true => {
                let tensors = state
                    .tensors
                    .into_iter()
                    .map(|(field, tensor)| Ok((field, tensor.full_data()?)))
                    .collect::<Result<_>>()?;
                StateSink {
                    tensors,
                    scalars: state.scalars.into_iter().collect(),
                }
            }
            false => state.into_parts(path)?,
        };
        let fields = StateFields::of(&given);
        let mut source = StateSource::new(given.scalars.into_iter().collect());
        given
            .tensors
            .into_iter()
            .for_each(|(field, data)| source.insert_tensor(field, data));
        let loaded = self.optimizer.state_unflatten(
            spec.shape().num_dims(),
            "",
            &mut source,
            spec.mesh().device(),
        );
        let found = loaded
            .as_ref()
            .map(|loaded| StateFields::of(&self.flat(loaded)));
        fields.check_loaded(path, found.as_ref())?;
        Ok(loaded.expect("`check_loaded` rejects a missing state"))
    }

    fn flat(&self, state: &DynState) -> StateSink {
        let mut sink = StateSink::default();
        self.optimizer.state_flatten("", state, &mut sink);
        sink
    }
}

/// Gathers the full tensor, without autodiff.
fn full_tensor_of<const D: usize>(tensor: &DTensor<D>) -> Result<Tensor<D>> {
    DTensor::from_parts(tensor.local().clone().inner(), tensor.spec().clone()).full_tensor()
}
