//! Steps of optimizers over host memory, which read and write each element once.
//!
//! They are a crate of their own so that builds without optimization, such as those of tests, can
//! optimize these loops alone.
//!
//! Each operation is rounded to the element type. The operations and their order are those of burn's
//! `Adam`, `AdamW`, `Lion` and `Sgd`, so the results have the same bits.

use half::{bf16, f16};

/// Factors by which a step multiplies the gradient first, one after the other; `None` for a gradient
/// that is used as it is.
pub type Factors = Option<[f64; 3]>;

/// Element type over which optimizers step: `f32`, `f64`, `f16` and `bf16`.
pub trait Element: Copy + Send + Sync {
    /// Steps `param`, with moments of the same length.
    fn adam(step: &AdamStep, param: &mut [Self], grad: &[Self], moments: [&mut [Self]; 2]);

    /// Steps `param`, with a momentum of the same length.
    fn lion(step: &LionStep, param: &mut [Self], grad: &[Self], momentum: &mut [Self]);

    /// Steps `param` without momentum.
    fn sgd(step: &SgdStep, param: &mut [Self], grad: &[Self]);

    /// Steps `param`, with a velocity of the same length.
    fn sgd_with_momentum(
        step: &SgdStep,
        momentum: &Momentum,
        param: &mut [Self],
        grad: &[Self],
        velocity: &mut [Self],
    );
}

/// A step of Adam or AdamW.
#[derive(Debug, Clone, Copy)]
pub struct AdamStep {
    /// Factor of the first moment.
    pub beta_1: f32,
    /// Factor of the second moment.
    pub beta_2: f32,
    /// Number that is added to the denominator.
    pub epsilon: f32,
    /// Learning rate.
    pub lr: f64,
    /// Number of this step, counted from 1.
    pub time: i32,
    /// Factors of the gradient.
    pub factors: Factors,
    /// The optimizer.
    pub rule: AdamRule,
}

/// The optimizer of an [`AdamStep`].
#[derive(Debug, Clone, Copy)]
pub enum AdamRule {
    /// Adam.
    Adam {
        /// Factor of the weight that is added to the gradient.
        penalty: Option<f32>,
    },
    /// AdamW.
    AdamW {
        /// Factor of the weight.
        decay: f64,
    },
}

/// A step of Lion.
#[derive(Debug, Clone, Copy)]
pub struct LionStep {
    /// Factor of the momentum in the update.
    pub beta_1: f32,
    /// Factor of the momentum in the next one.
    pub beta_2: f32,
    /// Learning rate.
    pub lr: f64,
    /// Factor of the weight.
    pub decay: f64,
    /// Factors of the gradient.
    pub factors: Factors,
}

/// A step of stochastic gradient descent.
#[derive(Debug, Clone, Copy)]
pub struct SgdStep {
    /// Learning rate.
    pub lr: f64,
    /// Factor of the weight that is added to the gradient.
    pub penalty: Option<f32>,
    /// Factors of the gradient.
    pub factors: Factors,
}

/// Momentum of an [`SgdStep`].
#[derive(Debug, Clone, Copy)]
pub struct Momentum {
    /// Factor of the velocity.
    pub momentum: f32,
    /// Part of the gradient that is not added to the velocity.
    pub dampening: f64,
    /// True for Nesterov's momentum.
    pub nesterov: bool,
}

/// Arithmetic that is rounded to the type after each operation.
trait Real: Copy {
    /// Rounds a scalar operand.
    fn scalar(value: f64) -> Self;
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn over(self, other: Self) -> Self;
    fn root(self) -> Self;
    /// Returns -1, 0 or 1; 0 for NaN.
    fn sign(self) -> Self;
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
            fn sign(self) -> Self {
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

        // In this crate, so that the loops are compiled with its optimization.
        impl Element for $real {
            fn adam(step: &AdamStep, param: &mut [Self], grad: &[Self], moments: [&mut [Self]; 2]) {
                adam(step, param, grad, moments);
            }

            fn lion(step: &LionStep, param: &mut [Self], grad: &[Self], momentum: &mut [Self]) {
                lion(step, param, grad, momentum);
            }

            fn sgd(step: &SgdStep, param: &mut [Self], grad: &[Self]) {
                sgd(step, param, grad);
            }

            fn sgd_with_momentum(
                step: &SgdStep,
                momentum: &Momentum,
                param: &mut [Self],
                grad: &[Self],
                velocity: &mut [Self],
            ) {
                sgd_with_momentum(step, momentum, param, grad, velocity);
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

/// Rounds a single-precision scalar operand.
fn scalar<E: Real>(value: f32) -> E {
    E::scalar(f64::from(value))
}

/// Runs a loop with the function that multiplies the gradient by `factors`.
macro_rules! with_factors {
    ($element:ty, $factors:expr, |$scaled:ident| $run:expr) => {
        match $factors {
            None => {
                let $scaled = |grad: $element| grad;
                $run
            }
            Some(factors) => {
                let [first, second, third] = factors.map(<$element>::scalar);
                let $scaled = |grad: $element| grad.times(first).times(second).times(third);
                $run
            }
        }
    };
}

fn adam<E: Real>(step: &AdamStep, param: &mut [E], grad: &[E], moments: [&mut [E]; 2]) {
    with_factors!(E, step.factors, |scaled| adam_of(
        step, scaled, param, grad, moments
    ));
}

#[inline(always)]
fn adam_of<E: Real>(
    step: &AdamStep,
    scaled: impl Fn(E) -> E,
    param: &mut [E],
    grad: &[E],
    moments: [&mut [E]; 2],
) {
    let AdamStep {
        beta_1,
        beta_2,
        epsilon,
        time,
        ..
    } = *step;
    let tensors = (param, grad, moments);
    let corrections = [beta_1, beta_2].map(|beta| 1.0 - beta.powi(time));
    match step.rule {
        AdamRule::Adam { penalty } => {
            let root = corrections[1].sqrt();
            let factor = scalar::<E>(root / corrections[0]);
            let epsilon = scalar::<E>(epsilon * root);
            let delta = |first: E, second: E| first.times(factor).over(second.root().plus(epsilon));
            match penalty.map(scalar::<E>) {
                None => with_moments(step, |weight, grad| (weight, scaled(grad)), delta, tensors),
                Some(penalty) => {
                    let decayed =
                        |weight: E, grad| (weight, weight.times(penalty).plus(scaled(grad)));
                    with_moments(step, decayed, delta, tensors);
                }
            }
        }
        AdamRule::AdamW { decay } => {
            let [first, second] = corrections.map(scalar::<E>);
            let epsilon = scalar::<E>(epsilon);
            let delta = |moment_1: E, moment_2: E| {
                moment_1
                    .over(first)
                    .over(moment_2.over(second).root().plus(epsilon))
            };
            match decay == 1.0 {
                true => with_moments(step, |weight, grad| (weight, scaled(grad)), delta, tensors),
                false => {
                    let decay = E::scalar(decay);
                    let decayed = |weight: E, grad| (weight.times(decay), scaled(grad));
                    with_moments(step, decayed, delta, tensors);
                }
            }
        }
    }
}

/// Steps the moments, and the weight with them. `decayed` returns the weight and the gradient after
/// weight decay, and `delta` the update of moments, without the learning rate.
#[inline(always)]
fn with_moments<E: Real>(
    step: &AdamStep,
    decayed: impl Fn(E, E) -> (E, E),
    delta: impl Fn(E, E) -> E,
    (param, grad, [moment_1, moment_2]): (&mut [E], &[E], [&mut [E]; 2]),
) {
    let [beta_1, beta_2] = [step.beta_1, step.beta_2].map(scalar::<E>);
    let [new_1, new_2] = [1.0 - step.beta_1, 1.0 - step.beta_2].map(scalar::<E>);
    let lr = E::scalar(step.lr);
    let moments = moment_1.iter_mut().zip(moment_2);
    for ((param, grad), (moment_1, moment_2)) in param.iter_mut().zip(grad).zip(moments) {
        let (weight, grad) = decayed(*param, *grad);
        *moment_1 = moment_1.times(beta_1).plus(grad.times(new_1));
        *moment_2 = moment_2.times(beta_2).plus(grad.times(grad).times(new_2));
        *param = weight.minus(delta(*moment_1, *moment_2).times(lr));
    }
}

fn lion<E: Real>(step: &LionStep, param: &mut [E], grad: &[E], momentum: &mut [E]) {
    with_factors!(E, step.factors, |scaled| lion_of(
        step, scaled, param, grad, momentum
    ));
}

#[inline(always)]
fn lion_of<E: Real>(
    step: &LionStep,
    scaled: impl Fn(E) -> E,
    param: &mut [E],
    grad: &[E],
    momentum: &mut [E],
) {
    let [of_old, of_new] = [step.beta_1, 1.0 - step.beta_1].map(scalar::<E>);
    let [kept, added] = [step.beta_2, 1.0 - step.beta_2].map(scalar::<E>);
    let (decay, lr) = (E::scalar(step.decay), E::scalar(step.lr));
    let decays = step.decay != 1.0;
    for ((param, grad), momentum) in param.iter_mut().zip(grad).zip(momentum) {
        let grad = scaled(*grad);
        let update = momentum.times(of_old).plus(grad.times(of_new)).sign();
        *momentum = momentum.times(kept).plus(grad.times(added));
        let weight = if decays { param.times(decay) } else { *param };
        *param = weight.minus(update.times(lr));
    }
}

fn sgd<E: Real>(step: &SgdStep, param: &mut [E], grad: &[E]) {
    with_factors!(E, step.factors, |scaled| {
        let lr = E::scalar(step.lr);
        let decayed = decayed(step, scaled);
        for (param, grad) in param.iter_mut().zip(grad) {
            *param = param.minus(decayed(*param, *grad).times(lr));
        }
    });
}

fn sgd_with_momentum<E: Real>(
    step: &SgdStep,
    &Momentum {
        momentum,
        dampening,
        nesterov,
    }: &Momentum,
    param: &mut [E],
    grad: &[E],
    velocity: &mut [E],
) {
    with_factors!(E, step.factors, |scaled| {
        let (lr, added) = (E::scalar(step.lr), E::scalar(1.0 - dampening));
        let momentum = scalar::<E>(momentum);
        let decayed = decayed(step, scaled);
        for ((param, grad), velocity) in param.iter_mut().zip(grad).zip(velocity) {
            let grad = decayed(*param, *grad);
            *velocity = grad.times(added).plus(velocity.times(momentum));
            let update = match nesterov {
                true => velocity.times(momentum).plus(grad),
                false => *velocity,
            };
            *param = param.minus(update.times(lr));
        }
    });
}

/// Returns the gradient after weight decay, of a weight and its gradient.
#[inline(always)]
fn decayed<E: Real>(step: &SgdStep, scaled: impl Fn(E) -> E) -> impl Fn(E, E) -> E {
    let penalty = step.penalty.map(scalar::<E>);
    move |weight, grad| match penalty {
        Some(penalty) => weight.times(penalty).plus(scaled(grad)),
        None => scaled(grad),
    }
}
