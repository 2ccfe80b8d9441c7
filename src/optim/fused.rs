//! Steps of burn's AdamW, Adam and Lion that read and write each element once.
//!
//! burn's optimizers make a tensor in each of some 14 operations. On the CPU, the optimizers here
//! make the same operations in the same order for one element after another, in the memory of the
//! parameter and of the state, so all bits are burn's. State is burn's own.
//!
//! # Invariants
//! 1. Each operation is rounded to the element type, as burn's CPU backend does, half precision too.
//! 2. Memory that another handle reads is copied, not written.
//! 3. What the loop does not take goes to burn's step: the first step of a parameter, tensors on
//!    another device, of several dtypes, tracked or empty, AMSGrad, and cautious weight decay.

use burn::optim::{
    Adam, AdamConfig, AdamState, AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState,
    LearningRate, Lion, LionConfig, LionState, Optimizer,
};
use burn::tensor::{DType, Device, Element, Tensor, TensorData};
use burn_dtensor_optim::{self as fused, AdamRule, AdamStep, LionStep};
use half::{bf16, f16};
use rayon::prelude::*;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::memory::is_host;

/// Elements that one thread steps at a time.
const CHUNK: usize = 16 << 10;

/// Returns the private fields of a burn configuration, by its serialized form.
fn fields<C: serde::Serialize, F: DeserializeOwned>(config: &C) -> F {
    let fields = serde_json::to_value(config).and_then(serde_json::from_value);
    fields.expect("the fields of burn's configurations are those of `fused`")
}

/// A pass over the elements of a parameter, its gradient, and `N` tensors of its state.
trait FusedPass<const N: usize>: Sync {
    /// Steps a chunk of them.
    fn chunk<E: fused::Element>(&self, param: &mut [E], grad: &[E], state: [&mut [E]; N]);
}

/// A parameter after a pass, with its state.
struct AfterPass<const D: usize, S> {
    param: Tensor<D>,
    state: S,
    /// The gradient, if the pass does not take the tensors: see the third invariant. They are
    /// unchanged then.
    left: Option<Tensor<D>>,
}

impl<const D: usize, S> AfterPass<D, S> {
    fn left(param: Tensor<D>, grad: Tensor<D>, state: S) -> Self {
        Self {
            param,
            state,
            left: Some(grad),
        }
    }

    /// Returns the result of the step, which is that of `burn` if the pass has left the tensors.
    fn or_burn<O: Optimizer>(
        self,
        burn: &O,
        lr: f64,
        state: impl FnOnce(S) -> O::State<D>,
    ) -> (Tensor<D>, Option<O::State<D>>) {
        let state = Some(state(self.state));
        match self.left {
            None => (self.param, state),
            Some(grad) => burn.step(lr, self.param, grad, state),
        }
    }
}

/// Steps `param` and `state` in their memory.
fn step_in_place<const D: usize, const N: usize>(
    pass: &impl FusedPass<N>,
    param: Tensor<D>,
    grad: Tensor<D>,
    state: [Tensor<D>; N],
) -> AfterPass<D, [Tensor<D>; N]> {
    let (device, dtype, shape) = (param.device(), param.dtype(), param.shape());
    let fits = |tensor: &Tensor<D>| {
        tensor.dtype() == dtype && tensor.shape() == shape && tensor.device() == device
    };
    let is_taken = is_host(&device)
        && shape.num_elements() > 0
        && matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
        && fits(&grad)
        && state.iter().all(fits);
    if !is_taken {
        return AfterPass::left(param, grad, state);
    }
    let mut tensors = SteppedMemory {
        param: param.into_data(),
        grad: grad.into_data(),
        state: state.map(Tensor::into_data),
    };
    let is_stepped = match dtype {
        DType::F32 => tensors.run::<f32>(pass),
        DType::F64 => tensors.run::<f64>(pass),
        DType::F16 => tensors.run::<f16>(pass),
        _ => tensors.run::<bf16>(pass),
    };
    let tensor = |data| Tensor::from_data(data, (&device, dtype));
    AfterPass {
        param: tensor(tensors.param),
        left: (!is_stepped).then(|| tensor(tensors.grad)),
        state: tensors.state.map(tensor),
    }
}

/// The memory of the tensors of a step.
struct SteppedMemory<const N: usize> {
    param: TensorData,
    grad: TensorData,
    state: [TensorData; N],
}

impl<const N: usize> SteppedMemory<N> {
    /// Steps all elements. Returns false if memory is not aligned to the element type.
    fn run<E: Element + fused::Element>(&mut self, pass: &impl FusedPass<N>) -> bool {
        let Self { param, grad, state } = self;
        let (Ok(param), Ok(grad)) = (param.as_mut_slice::<E>(), grad.as_slice::<E>()) else {
            return false;
        };
        let Ok(state) = state
            .iter_mut()
            .map(|tensor| tensor.as_mut_slice::<E>())
            .collect::<Result<Vec<_>, _>>()
        else {
            return false;
        };
        let mut chunks = Vec::with_capacity(param.len().div_ceil(CHUNK));
        let mut state: Vec<_> = state.into_iter().map(|all| all.chunks_mut(CHUNK)).collect();
        for (param, grad) in param.chunks_mut(CHUNK).zip(grad.chunks(CHUNK)) {
            let state =
                std::array::from_fn(|at| state[at].next().expect("all tensors have one length"));
            chunks.push((param, grad, state));
        }
        let step = |(param, grad, state): (&mut [E], &[E], [&mut [E]; N])| {
            pass.chunk(param, grad, state);
        };
        match chunks.len() {
            1 => chunks.into_iter().for_each(step),
            _ => chunks.into_par_iter().for_each(step),
        }
        true
    }
}

impl FusedPass<2> for AdamStep {
    fn chunk<E: fused::Element>(&self, param: &mut [E], grad: &[E], moments: [&mut [E]; 2]) {
        E::adam(self, param, grad, moments);
    }
}

impl FusedPass<1> for LionStep {
    fn chunk<E: fused::Element>(&self, param: &mut [E], grad: &[E], [momentum]: [&mut [E]; 1]) {
        E::lion(self, param, grad, momentum);
    }
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
            return self.burn.step(lr, param, grad, None);
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
            return self.burn.step(lr, param, grad, None);
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
            return self.burn.step(lr, param, grad, None);
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
        };
        step_in_place(&pass, param, grad, [momentum])
            .or_burn(&self.burn, lr, |[momentum]| LionState { momentum })
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        Lion::to_device(state, device)
    }
}
