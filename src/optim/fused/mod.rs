//! Steps of burn's AdamW, Adam, Lion and Sgd that read and write each element once.
//!
//! burn's optimizers make a tensor in each of some 14 operations. On the CPU, the optimizers here
//! make the same operations in the same order for one element after another, in the memory of the
//! parameter and of the state, so all bits are burn's. State is burn's own.
//!
//! # Invariants
//! 1. Each operation is rounded to the element type, as burn's CPU backend does, half precision too.
//! 2. Memory that another handle reads is copied, not written.
//! 3. On Cube devices, tensors in single precision are stepped by kernels for lists of tensors. Their
//!    results are within a few units in the last place of burn's.
//! 4. Factors of the gradient ([`GradFactor`](super::GradFactor)) are applied as the gradient is read.
//! 5. What neither takes goes to burn's step: the first step of a parameter, tensors on
//!    another device, of several dtypes, tracked or empty, AMSGrad, and cautious weight decay.

#[cfg(feature = "cube")]
mod cube;
#[cfg(all(test, feature = "cube"))]
mod cube_tests;
mod host;
mod pass;

use std::any::{Any, TypeId};

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    Adam, AdamConfig, AdamState, AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState,
    LearningRate, Lion, LionConfig, LionState, Optimizer, RecordState, SgdConfig, StateSink,
    StateSource,
};
use burn::tensor::{Device, Tensor};
use burn_dtensor_optim::{AdamRule, AdamStep, LionStep, Momentum, SgdStep};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::factor;
pub(super) use host::is_taken;
use host::step_in_place;
use pass::{AfterPass, MomentumStep};

/// Returns the private fields of a burn configuration, by its serialized form.
fn fields<C: serde::Serialize, F: DeserializeOwned>(config: &C) -> F {
    let fields = serde_json::to_value(config).and_then(serde_json::from_value);
    fields.expect("the fields of burn's configurations are those of `fused`")
}

/// Returns true if `O` is an optimizer of this module.
pub(super) fn is_fused<O: 'static>() -> bool {
    let own = [
        TypeId::of::<FusedAdamW>(),
        TypeId::of::<FusedAdam>(),
        TypeId::of::<FusedLion>(),
        TypeId::of::<FusedSgd>(),
    ];
    own.contains(&TypeId::of::<O>())
}

/// Makes the steps of a model. Tensors on Cube devices are stepped in lists.
pub(super) fn in_lists<T>(step: impl FnOnce() -> T) -> T {
    #[cfg(feature = "cube")]
    return cube::in_lists(step).0;
    #[cfg(not(feature = "cube"))]
    step()
}

/// Makes a step whose result is read before that of the model ends.
pub(super) fn at_once<T>(step: impl FnOnce() -> T) -> T {
    #[cfg(feature = "cube")]
    return cube::at_once(step);
    #[cfg(not(feature = "cube"))]
    step()
}

/// Returns true if the optimizer makes one pass over host memory, and not burn's operations.
pub(super) fn steps_in_one_pass(optimizer: &dyn Any) -> bool {
    if let Some(adamw) = optimizer.downcast_ref::<FusedAdamW>() {
        return !adamw.moments.amsgrad && !adamw.cautious_weight_decay;
    }
    match optimizer.downcast_ref::<FusedAdam>() {
        Some(adam) => !adam.moments.amsgrad,
        None => optimizer.is::<FusedLion>() || optimizer.is::<FusedSgd>(),
    }
}

/// Makes the first step of a parameter, which creates its state.
fn first_step<O: Optimizer, const D: usize>(
    burn: &O,
    lr: LearningRate,
    param: Tensor<D>,
    grad: Tensor<D>,
) -> (Tensor<D>, Option<O::State<D>>) {
    burn.step(lr, param, factor::current().scale(grad), None)
}

/// Fields of Adam and AdamW.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Moments {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    amsgrad: bool,
}

impl Moments {
    fn step(&self, lr: f64, time: i32, rule: AdamRule) -> AdamStep {
        let Self {
            beta_1,
            beta_2,
            epsilon,
            ..
        } = *self;
        AdamStep {
            beta_1,
            beta_2,
            epsilon,
            lr,
            time,
            factors: factor::current().factors(),
            rule,
        }
    }
}

/// Steps by adaptive moments.
fn step_moments<const D: usize>(
    moments: &Moments,
    (lr, rule): (f64, AdamRule),
    param: Tensor<D>,
    grad: Tensor<D>,
    state: AdaptiveMomentumState<D>,
) -> AfterPass<D, AdaptiveMomentumState<D>> {
    if moments.amsgrad || state.max_moment_2.is_some() {
        return AfterPass::left(param, grad, state);
    }
    let time = state.time + 1;
    let pass = moments.step(lr, time as i32, rule);
    let AfterPass { param, state, left } =
        step_in_place(&pass, param, grad, [state.moment_1, state.moment_2]);
    let [moment_1, moment_2] = state;
    let time = if left.is_none() { time } else { time - 1 };
    let state = AdaptiveMomentumState::new(time, moment_1, moment_2);
    AfterPass { param, state, left }
}

/// burn's [`AdamW`], in one pass over memory where it can: [`ExactOnShards`](super::ExactOnShards)
/// builds it of an `AdamWConfig`.
#[derive(Clone)]
pub struct FusedAdamW {
    burn: AdamW,
    moments: Moments,
    weight_decay: f32,
    cautious_weight_decay: bool,
}

impl From<&AdamWConfig> for FusedAdamW {
    fn from(config: &AdamWConfig) -> Self {
        #[derive(Deserialize)]
        struct AdamWDecay {
            weight_decay: f32,
            cautious_weight_decay: bool,
        }
        let AdamWDecay {
            weight_decay,
            cautious_weight_decay,
        } = fields(config);
        Self {
            burn: config.build(),
            moments: fields(config),
            weight_decay,
            cautious_weight_decay,
        }
    }
}

impl Optimizer for FusedAdamW {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let Some(AdamWState { momentum }) = state else {
            return first_step(&self.burn, lr, param, grad);
        };
        let decay_rate = lr * f64::from(self.weight_decay);
        let rule = AdamRule::AdamW {
            decay: 1.0 - decay_rate,
        };
        let stepped = match self.cautious_weight_decay && decay_rate != 0.0 {
            true => AfterPass::left(param, grad, momentum),
            false => step_moments(&self.moments, (lr, rule), param, grad, momentum),
        };
        stepped.or_burn(&self.burn, lr, |momentum| AdamWState { momentum })
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        AdamW::to_device(state, device)
    }
}

/// burn's [`Adam`], in one pass over memory where it can: [`ExactOnShards`](super::ExactOnShards)
/// builds it of an `AdamConfig`.
#[derive(Clone)]
pub struct FusedAdam {
    burn: Adam,
    moments: Moments,
    penalty: Option<f32>,
}

impl From<&AdamConfig> for FusedAdam {
    fn from(config: &AdamConfig) -> Self {
        #[derive(Deserialize)]
        struct Penalty {
            penalty: f32,
        }
        #[derive(Deserialize)]
        struct AdamDecay {
            weight_decay: Option<Penalty>,
        }
        let AdamDecay { weight_decay } = fields(config);
        Self {
            burn: config.build(),
            moments: fields(config),
            penalty: weight_decay.map(|decay| decay.penalty),
        }
    }
}

impl Optimizer for FusedAdam {
    type State<const D: usize> = AdamState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let Some(AdamState { momentum }) = state else {
            return first_step(&self.burn, lr, param, grad);
        };
        let rule = AdamRule::Adam {
            penalty: self.penalty,
        };
        step_moments(&self.moments, (lr, rule), param, grad, momentum).or_burn(
            &self.burn,
            lr,
            |momentum| AdamState { momentum },
        )
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        Adam::to_device(state, device)
    }
}

/// burn's [`Lion`], in one pass over memory where it can: [`ExactOnShards`](super::ExactOnShards)
/// builds it of a `LionConfig`.
#[derive(Clone)]
pub struct FusedLion {
    burn: Lion,
    fields: LionFields,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct LionFields {
    beta_1: f32,
    beta_2: f32,
    weight_decay: f32,
}

impl From<&LionConfig> for FusedLion {
    fn from(config: &LionConfig) -> Self {
        Self {
            burn: config.build(),
            fields: fields(config),
        }
    }
}

impl Optimizer for FusedLion {
    type State<const D: usize> = LionState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let Some(LionState { momentum }) = state else {
            return first_step(&self.burn, lr, param, grad);
        };
        let LionFields {
            beta_1,
            beta_2,
            weight_decay,
        } = self.fields;
        let pass = LionStep {
            beta_1,
            beta_2,
            lr,
            decay: 1.0 - lr * f64::from(weight_decay),
            factors: factor::current().factors(),
        };
        step_in_place(&pass, param, grad, [momentum])
            .or_burn(&self.burn, lr, |[momentum]| LionState { momentum })
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        Lion::to_device(state, device)
    }
}

/// burn's [`Sgd`](burn::optim::Sgd), in one pass over memory where it can:
/// [`ExactOnShards`](super::ExactOnShards) builds it of an `SgdConfig`.
#[derive(Clone)]
pub struct FusedSgd {
    fields: SgdFields,
}

#[derive(Debug, Clone, Deserialize)]
struct SgdFields {
    weight_decay: Option<WeightDecayConfig>,
    momentum: Option<MomentumConfig>,
}

impl From<&SgdConfig> for FusedSgd {
    fn from(config: &SgdConfig) -> Self {
        Self {
            fields: fields(config),
        }
    }
}

/// State of [`FusedSgd`]. Its records are those of burn's `SgdState`, whose fields are private.
#[derive(Clone)]
pub struct FusedSgdState<const D: usize> {
    velocity: Option<Tensor<D>>,
}

/// Prefix and name of the velocity in records of burn's `SgdState`.
const VELOCITY: [&str; 2] = ["momentum", "velocity"];

impl<const D: usize> RecordState for FusedSgdState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if let Some(velocity) = &self.velocity {
            let prefix = burn::optim::join_path(prefix, VELOCITY[0]);
            out.push_tensor(&prefix, VELOCITY[1], velocity.clone().into_data());
        }
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let prefix = burn::optim::join_path(prefix, VELOCITY[0]);
        let velocity = source.take_tensor(&prefix, VELOCITY[1]);
        Some(Self {
            velocity: velocity.map(|data| Tensor::from_data(data, device)),
        })
    }
}

impl FusedSgd {
    /// Steps with burn's operations. `scaled` is the gradient after its factors.
    fn by_tensors<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        scaled: Tensor<D>,
        velocity: Option<Tensor<D>>,
    ) -> (Tensor<D>, Option<Tensor<D>>) {
        let grad = match &self.fields.weight_decay {
            Some(decay) => param.clone().mul_scalar(decay.penalty).add(scaled),
            None => scaled,
        };
        let Some(momentum) = &self.fields.momentum else {
            return (param - grad.mul_scalar(lr), velocity);
        };
        let factor = momentum.momentum as f32;
        let velocity = match velocity {
            Some(velocity) => {
                let added = grad.clone().mul_scalar(1.0 - momentum.dampening);
                added.add(velocity.mul_scalar(factor))
            }
            None => grad.clone(),
        };
        let update = match momentum.nesterov {
            true => velocity.clone().mul_scalar(factor).add(grad),
            false => velocity.clone(),
        };
        (param - update.mul_scalar(lr), Some(velocity))
    }
}

impl Optimizer for FusedSgd {
    type State<const D: usize> = FusedSgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let sgd = SgdStep {
            lr,
            penalty: self.fields.weight_decay.as_ref().map(|decay| decay.penalty),
            factors: factor::current().factors(),
        };
        let velocity = state.and_then(|state| state.velocity);
        let AfterPass { param, state, left } = match (&self.fields.momentum, velocity) {
            (None, velocity) => step_in_place(&sgd, param, grad, []).with_state(|[]| velocity),
            (Some(momentum), Some(velocity)) => {
                let momentum = Momentum {
                    momentum: momentum.momentum as f32,
                    dampening: momentum.dampening,
                    nesterov: momentum.nesterov,
                };
                let step = MomentumStep { sgd, momentum };
                step_in_place(&step, param, grad, [velocity])
                    .with_state(|[velocity]| Some(velocity))
            }
            (Some(_), None) => AfterPass::left(param, grad, None),
        };
        let (param, velocity) = match left {
            None => (param, state),
            Some(grad) => self.by_tensors(lr, param, factor::current().scale(grad), state),
        };
        (param, Some(FusedSgdState { velocity }))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        FusedSgdState {
            velocity: state.velocity.map(|velocity| velocity.to_device(device)),
        }
    }
}
