//! burn optimizers for one distributed parameter, whose layout they know.

use std::sync::Arc;

use burn::module::{ParamGroup, ParamId};
use burn::optim::{LearningRate, ModuleOptimizer, MuonState, Optimizer};
use burn::tensor::{Device, Tensor};

use super::clip::clip_one;
use super::muon::{MuonMatrix, Stages, Velocity, orthogonalized};
use super::realigned::{Realigned, RealignedState};
use crate::dtensor::DTensorSpec;
use crate::error::OrUnwind;

/// Adds a parameter's group, with the optimizer of the group it comes from, to burn's optimizer.
type AddGroup =
    dyn Fn(ModuleOptimizer, ParamGroup, Option<Arc<DTensorSpec>>) -> ModuleOptimizer + Send + Sync;

/// A group whose gradients are clipped by norm.
#[derive(Clone)]
pub(super) struct ClippedGroup {
    pub(super) max_norm: f32,
    add: Arc<AddGroup>,
}

impl ClippedGroup {
    pub(super) fn new<O: Optimizer>(optimizer: O, max_norm: f32) -> Self {
        let add = move |optim: ModuleOptimizer, params, spec| {
            optim.with_group(
                params,
                ClippedOnShards {
                    optimizer: optimizer.clone(),
                    max_norm,
                    spec,
                },
                None,
            )
        };
        Self {
            max_norm,
            add: Arc::new(add),
        }
    }

    /// Adds a group of one parameter with this spec, `None` if it is not distributed.
    pub(super) fn add(
        &self,
        optim: ModuleOptimizer,
        param: ParamGroup,
        spec: Option<Arc<DTensorSpec>>,
    ) -> ModuleOptimizer {
        (self.add)(optim, param, spec)
    }
}

/// Optimizer that clips a gradient by the norm of all its shards.
#[derive(Clone)]
struct ClippedOnShards<O> {
    optimizer: O,
    max_norm: f32,
    spec: Option<Arc<DTensorSpec>>,
}

impl<O: Optimizer> Optimizer for ClippedOnShards<O> {
    type State<const D: usize> = O::State<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        grad: Tensor<D>,
        state: Option<O::State<D>>,
    ) -> (Tensor<D>, Option<O::State<D>>) {
        let grad = clip_one(grad, self.max_norm, self.spec.as_deref()).or_unwind();
        self.optimizer.step(lr, param, grad, state)
    }

    fn to_device<const D: usize>(state: O::State<D>, device: &Device) -> O::State<D> {
        O::to_device(state, device)
    }
}

/// Muon for one matrix.
#[derive(Clone)]
pub(super) struct MuonOnShards {
    pub(super) stages: Stages,
    pub(super) id: ParamId,
    pub(super) path: Arc<str>,
    pub(super) spec: Option<Arc<DTensorSpec>>,
}

impl Optimizer for MuonOnShards {
    type State<const D: usize> = RealignedState<MuonState<D>>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let Stages {
            velocity,
            orthogonal,
            apply,
        } = &self.stages;
        let (velocity, state) = velocity.step(lr, param.clone(), grad, state);
        let part = Tensor::<2>::from_dispatch(velocity.into_dispatch());
        let spec = self.spec.as_ref().map(|spec| spec.in_dtype(part.dtype()));
        let matrix = MuonMatrix {
            id: self.id,
            path: self.path.clone(),
            spec,
            part,
            lr,
            muon: orthogonal.clone(),
        };
        let (_, update) = orthogonalized(vec![matrix], &[]).or_unwind().remove(0);
        let update = Tensor::<D>::from_dispatch(update.into_dispatch());
        (apply.step(lr, param, update, None).0, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        Realigned::<Velocity>::to_device(state, device)
    }
}
