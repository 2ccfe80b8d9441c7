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

/// Element type whose operations are rounded as burn's CPU backend does.
trait Real: Element + Send + Sync {
    /// Rounds a scalar operand.
    fn scalar(value: f64) -> Self;
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn over(self, other: Self) -> Self;
    fn root(self) -> Self;
    /// Returns -1, 0 or 1; 0 for NaN.
    fn signum_or_zero(self) -> Self;
}

macro_rules! real {
    ($($real:ty: |$value:ident| $wide:expr, |$result:ident| $narrow:expr, |$scalar:ident| $round:expr;)*) => {$(
        impl Real for $real {
            #[inline(always)]
            fn scalar($scalar: f64) -> Self {
                $round
            }

            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                let $result = { let $value = self; $wide } + { let $value = other; $wide };
                $narrow
            }

            #[inline(always)]
            fn minus(self, other: Self) -> Self {
                let $result = { let $value = self; $wide } - { let $value = other; $wide };
                $narrow
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                let $result = { let $value = self; $wide } * { let $value = other; $wide };
                $narrow
            }

            #[inline(always)]
            fn over(self, other: Self) -> Self {
                let $result = { let $value = self; $wide } / { let $value = other; $wide };
                $narrow
            }

            #[inline(always)]
            fn root(self) -> Self {
                let $value = self;
                let $result = $wide.sqrt();
                $narrow
            }

            #[inline(always)]
            fn signum_or_zero(self) -> Self {
                let $value = self;
                let wide = $wide;
                let $result = if wide > 0.0 {
                    1.0
                } else if wide < 0.0 {
                    -1.0
                } else {
                    0.0
                };
                $narrow
            }
        }
    )*};
}

real! {
    f32: |x| x, |x| x, |x| x as f32;
    f64: |x| x, |x| x, |x| x;
    f16: |x| x.to_f32(), |x| f16::from_f32(x), |x| f16::from_f32(x as f32);
    bf16: |x| x.to_f32(), |x| bf16::from_f32(x), |x| bf16::from_f32(x as f32);
}

/// A pass over the elements of a parameter, its gradient, and `N` tensors of its state.
trait Pass<const N: usize>: Sync {
    /// Steps a chunk of them.
    fn chunk<E: Real>(&self, param: &mut [E], grad: &[E], state: [&mut [E]; N]);
}

/// Steps `param` and `state` in their memory. Returns the tensors, stepped if `Ok`, and unchanged if
/// the pass does not take them: see the third invariant.
#[allow(clippy::type_complexity)]
fn step_in_place<const D: usize, const N: usize>(
    pass: &impl Pass<N>,
    param: Tensor<D>,
    grad: Tensor<D>,
    state: [Tensor<D>; N],
) -> Result<(Tensor<D>, [Tensor<D>; N]), (Tensor<D>, Tensor<D>, [Tensor<D>; N])> {
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
        return Err((param, grad, state));
    }
    let mut tensors = Tensors {
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
    let (param, state) = (tensor(tensors.param), tensors.state.map(tensor));
    match is_stepped {
        true => Ok((param, state)),
        false => Err((param, tensor(tensors.grad), state)),
    }
}

/// The memory of the tensors of a step.
struct Tensors<const N: usize> {
    param: TensorData,
    grad: TensorData,
    state: [TensorData; N],
}

impl<const N: usize> Tensors<N> {
    /// Steps all elements. Returns false if memory is not aligned to the element type.
    fn run<E: Real>(&mut self, pass: &impl Pass<N>) -> bool {
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

/// Adaptive moments of Adam and AdamW at one step.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Moments {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    amsgrad: bool,
}

impl Moments {
    /// Steps the moments, and the weight with them. `decayed` returns the weight and the gradient
    /// after weight decay, and `delta` the update of moments, without the learning rate.
    #[inline(always)]
    fn step<E: Real>(
        &self,
        lr: f64,
        decayed: impl Fn(E, E) -> (E, E),
        delta: impl Fn(E, E) -> E,
        (param, grad): (&mut [E], &[E]),
        [moment_1, moment_2]: [&mut [E]; 2],
    ) {
        let [beta_1, beta_2] = [self.beta_1, self.beta_2].map(scalar::<E>);
        let [new_1, new_2] = [1.0 - self.beta_1, 1.0 - self.beta_2].map(scalar::<E>);
        let lr = E::scalar(lr);
        let moments = moment_1.iter_mut().zip(moment_2);
        for ((param, grad), (moment_1, moment_2)) in param.iter_mut().zip(grad).zip(moments) {
            let (weight, grad) = decayed(*param, *grad);
            *moment_1 = moment_1.times(beta_1).plus(grad.times(new_1));
            *moment_2 = moment_2.times(beta_2).plus(grad.times(grad).times(new_2));
            *param = weight.minus(delta(*moment_1, *moment_2).times(lr));
        }
    }
}

/// Rounds a number of burn's configurations.
fn scalar<E: Real>(value: f32) -> E {
    E::scalar(f64::from(value))
}

/// A step by adaptive moments.
#[derive(Clone, Copy)]
struct AdamPass {
    moments: Moments,
    lr: f64,
    /// Number of this step.
    time: i32,
    rule: AdamRule,
}

#[derive(Clone, Copy)]
enum AdamRule {
    /// Adam, with this factor of the weight in the gradient.
    Adam { penalty: Option<f32> },
    /// AdamW, with this factor of the weight.
    AdamW { decay: f64 },
}

impl Pass<2> for AdamPass {
    fn chunk<E: Real>(&self, param: &mut [E], grad: &[E], state: [&mut [E]; 2]) {
        let Self {
            moments, lr, time, ..
        } = *self;
        let tensors = (param, grad);
        let corrections = [moments.beta_1, moments.beta_2].map(|beta| 1.0 - beta.powi(time));
        match self.rule {
            AdamRule::Adam { penalty } => {
                let root = corrections[1].sqrt();
                let factor = scalar::<E>(root / corrections[0]);
                let epsilon = scalar::<E>(moments.epsilon * root);
                let delta =
                    |first: E, second: E| first.times(factor).over(second.root().plus(epsilon));
                match penalty.map(scalar::<E>) {
                    None => moments.step(lr, |weight, grad| (weight, grad), delta, tensors, state),
                    Some(penalty) => {
                        let decayed = |weight: E, grad| (weight, weight.times(penalty).plus(grad));
                        moments.step(lr, decayed, delta, tensors, state);
                    }
                }
            }
            AdamRule::AdamW { decay } => {
                let corrections = corrections.map(scalar::<E>);
                let epsilon = scalar::<E>(moments.epsilon);
                let delta = |first: E, second: E| {
                    let second = second.over(corrections[1]);
                    first.over(corrections[0]).over(second.root().plus(epsilon))
                };
                match decay == 1.0 {
                    true => moments.step(lr, |weight, grad| (weight, grad), delta, tensors, state),
                    false => {
                        let decay = E::scalar(decay);
                        let decayed = |weight: E, grad| (weight.times(decay), grad);
                        moments.step(lr, decayed, delta, tensors, state);
                    }
                }
            }
        }
    }
}

/// Steps by adaptive moments, or returns the tensors as they are.
#[allow(clippy::type_complexity)]
fn step_moments<const D: usize>(
    mut pass: AdamPass,
    param: Tensor<D>,
    grad: Tensor<D>,
    state: AdaptiveMomentumState<D>,
) -> Result<(Tensor<D>, AdaptiveMomentumState<D>), (Tensor<D>, Tensor<D>, AdaptiveMomentumState<D>)>
{
    if pass.moments.amsgrad || state.max_moment_2.is_some() {
        return Err((param, grad, state));
    }
    let time = state.time + 1;
    pass.time = time as i32;
    let with =
        |time, [moment_1, moment_2]: [_; 2]| AdaptiveMomentumState::new(time, moment_1, moment_2);
    match step_in_place(&pass, param, grad, [state.moment_1, state.moment_2]) {
        Ok((param, moments)) => Ok((param, with(time, moments))),
        Err((param, grad, moments)) => Err((param, grad, with(time - 1, moments))),
    }
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
        struct Decay {
            weight_decay: f32,
            cautious_weight_decay: bool,
        }
        let Decay {
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
        let pass = AdamPass {
            moments: self.moments,
            lr,
            time: 0,
            rule: AdamRule::AdamW {
                decay: 1.0 - decay_rate,
            },
        };
        let stepped = match self.cautious_weight_decay && decay_rate != 0.0 {
            true => Err((param, grad, momentum)),
            false => step_moments(pass, param, grad, momentum),
        };
        match stepped {
            Ok((param, momentum)) => (param, Some(AdamWState { momentum })),
            Err((param, grad, momentum)) => {
                self.burn
                    .step(lr, param, grad, Some(AdamWState { momentum }))
            }
        }
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
        struct Decay {
            weight_decay: Option<Penalty>,
        }
        let Decay { weight_decay } = fields(config);
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
        let pass = AdamPass {
            moments: self.moments,
            lr,
            time: 0,
            rule: AdamRule::Adam {
                penalty: self.penalty,
            },
        };
        match step_moments(pass, param, grad, momentum) {
            Ok((param, momentum)) => (param, Some(AdamState { momentum })),
            Err((param, grad, momentum)) => {
                self.burn
                    .step(lr, param, grad, Some(AdamState { momentum }))
            }
        }
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

/// A step of [`FusedLion`].
struct LionPass {
    fields: LionFields,
    lr: f64,
}

impl Pass<1> for LionPass {
    fn chunk<E: Real>(&self, param: &mut [E], grad: &[E], [momentum]: [&mut [E]; 1]) {
        let LionFields {
            beta_1,
            beta_2,
            weight_decay,
        } = self.fields;
        let [of_old, of_new] = [beta_1, 1.0 - beta_1].map(scalar::<E>);
        let [kept, added] = [beta_2, 1.0 - beta_2].map(scalar::<E>);
        let decay = 1.0 - self.lr * f64::from(weight_decay);
        let (decays, decay, lr) = (decay != 1.0, E::scalar(decay), E::scalar(self.lr));
        for ((param, grad), momentum) in param.iter_mut().zip(grad).zip(momentum) {
            let update = momentum
                .times(of_old)
                .plus(grad.times(of_new))
                .signum_or_zero();
            *momentum = momentum.times(kept).plus(grad.times(added));
            let weight = if decays { param.times(decay) } else { *param };
            *param = weight.minus(update.times(lr));
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
        let fields = self.fields;
        match step_in_place(&LionPass { fields, lr }, param, grad, [momentum]) {
            Ok((param, [momentum])) => (param, Some(LionState { momentum })),
            Err((param, grad, [momentum])) => {
                self.burn
                    .step(lr, param, grad, Some(LionState { momentum }))
            }
        }
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        Lion::to_device(state, device)
    }
}
