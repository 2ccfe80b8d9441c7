//! Muon's work on shards, before and after orthogonalization, as burn optimizers.

use std::sync::Arc;

use burn::config::Config;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::{Momentum, MomentumConfig};
use burn::optim::{LearningRate, Muon, MuonConfig, MuonState, Optimizer};
use burn::tensor::{Device, Tensor};

use crate::optim::realigned::Realigned;

/// A Muon configuration, split into three stages that run in this order: `velocity`, `orthogonal`,
/// `apply`.
#[derive(Clone)]
pub(in crate::optim) struct Stages {
    pub(in crate::optim) velocity: Realigned<Velocity>,
    /// Orthogonalization of full matrices, without momentum and weight decay.
    pub(in crate::optim) orthogonal: Arc<Muon>,
    pub(in crate::optim) apply: Realigned<Apply>,
}

/// Fields of burn's configuration that are needed on shards. They are private in burn, so they are
/// read from its JSON.
#[derive(Config, Debug)]
struct OnShards {
    weight_decay: Option<WeightDecayConfig>,
    momentum: MomentumConfig,
}

impl Stages {
    pub(in crate::optim) fn of(config: &MuonConfig) -> Self {
        let on_shards = OnShards::load_binary(config.to_string().as_bytes())
            .expect("burn writes what it reads");
        let none = MomentumConfig {
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
        };
        Self {
            velocity: Realigned(Velocity(Momentum::new(&on_shards.momentum))),
            orthogonal: Arc::new(
                config
                    .clone()
                    .with_momentum(none)
                    .with_weight_decay(None)
                    .build(),
            ),
            apply: Realigned(Apply {
                penalty: on_shards
                    .weight_decay
                    .map_or(0.0, |decay| f64::from(decay.penalty)),
            }),
        }
    }
}

/// Optimizer that replaces a parameter by the output of momentum for its gradient. It has the state
/// of burn's Muon.
#[derive(Clone)]
pub(in crate::optim) struct Velocity(Momentum);

impl Optimizer for Velocity {
    type State<const D: usize> = MuonState<D>;

    fn step<const D: usize>(
        &self,
        _: LearningRate,
        _: Tensor<D>,
        grad: Tensor<D>,
        state: Option<MuonState<D>>,
    ) -> (Tensor<D>, Option<MuonState<D>>) {
        let (grad, momentum) = self.0.transform(grad, state.map(|state| state.momentum));
        (grad, Some(MuonState::new(momentum)))
    }

    fn to_device<const D: usize>(mut state: MuonState<D>, device: &Device) -> MuonState<D> {
        state.momentum = state.momentum.to_device(device);
        state
    }
}

/// Optimizer that applies weight decay to a parameter, then adds the update that is passed as its
/// gradient.
#[derive(Clone)]
pub(in crate::optim) struct Apply {
    penalty: f64,
}

impl Optimizer for Apply {
    type State<const D: usize> = ();

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        step: Tensor<D>,
        _: Option<()>,
    ) -> (Tensor<D>, Option<()>) {
        let param = if self.penalty == 0.0 {
            param
        } else {
            param.mul_scalar(1.0 - lr * self.penalty)
        };
        (param + step, None)
    }

    fn to_device<const D: usize>((): (), _: &Device) {}
}
