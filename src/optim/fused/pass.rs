//! [`FusedPass`]: the passes of optimizers over a parameter, its gradient and its state.

use burn::optim::Optimizer;
use burn::tensor::Tensor;
use burn_dtensor_optim::{self as loops, AdamStep, LionStep, Momentum, SgdStep};
#[cfg(feature = "cube")]
use burn_dtensor_optim::{AdamRule, Factors};

#[cfg(feature = "cube")]
use crate::kernels::cube::{StepFormula, StepScalars};
use crate::optim::factor;

/// A pass over the elements of a parameter, its gradient, and `N` tensors of its state.
pub(super) trait FusedPass<const N: usize>: Sync {
    /// Steps a chunk of them.
    fn chunk<E: loops::Element>(&self, param: &mut [E], grad: &[E], state: [&mut [E]; N]);

    /// Returns the formula and the numbers of the same step for a kernel.
    #[cfg(feature = "cube")]
    fn on_device(&self) -> (StepFormula, StepScalars);
}

/// A parameter after a pass, with its state.
pub(super) struct AfterPass<const D: usize, S> {
    pub(super) param: Tensor<D>,
    pub(super) state: S,
    /// The gradient, if the pass does not take the tensors: see the fifth invariant. They are
    /// unchanged then.
    pub(super) left: Option<Tensor<D>>,
}

impl<const D: usize, S> AfterPass<D, S> {
    pub(super) fn left(param: Tensor<D>, grad: Tensor<D>, state: S) -> Self {
        Self {
            param,
            state,
            left: Some(grad),
        }
    }

    /// Returns the same with another form of the state.
    pub(super) fn with_state<T>(self, state: impl FnOnce(S) -> T) -> AfterPass<D, T> {
        AfterPass {
            param: self.param,
            state: state(self.state),
            left: self.left,
        }
    }

    /// Returns the result of the step, which is that of `burn` if the pass has left the tensors.
    pub(super) fn or_burn<O: Optimizer>(
        self,
        burn: &O,
        lr: f64,
        state: impl FnOnce(S) -> O::State<D>,
    ) -> (Tensor<D>, Option<O::State<D>>) {
        let state = Some(state(self.state));
        match self.left {
            None => (self.param, state),
            Some(grad) => burn.step(lr, self.param, factor::current().scale(grad), state),
        }
    }
}

/// Returns the product of the factors, by which a kernel multiplies at once.
#[cfg(feature = "cube")]
fn product(factors: Factors) -> f32 {
    factors.map_or(1.0, |factors| factors.iter().product::<f64>() as f32)
}

impl FusedPass<2> for AdamStep {
    fn chunk<E: loops::Element>(&self, param: &mut [E], grad: &[E], moments: [&mut [E]; 2]) {
        E::adam(self, param, grad, moments);
    }

    #[cfg(feature = "cube")]
    fn on_device(&self) -> (StepFormula, StepScalars) {
        let Self {
            beta_1,
            beta_2,
            epsilon,
            lr,
            time,
            ..
        } = *self;
        let [first, second] = [beta_1, beta_2].map(|beta: f32| 1.0 - beta.powi(time));
        let scalars = StepScalars {
            factor: product(self.factors),
            lr: lr as f32,
            decay: 1.0,
            kept: [beta_1, beta_2],
            added: [1.0 - beta_1, 1.0 - beta_2],
            corrections: [first, second],
            epsilon,
            ..StepScalars::default()
        };
        match self.rule {
            AdamRule::AdamW { decay } => {
                let decay = decay as f32;
                (StepFormula::AdamW, StepScalars { decay, ..scalars })
            }
            AdamRule::Adam { penalty } => {
                let root = second.sqrt();
                let scalars = StepScalars {
                    penalty: penalty.unwrap_or(0.0),
                    corrections: [first / root, 1.0],
                    epsilon: epsilon * root,
                    ..scalars
                };
                (StepFormula::Adam, scalars)
            }
        }
    }
}

impl FusedPass<1> for LionStep {
    fn chunk<E: loops::Element>(&self, param: &mut [E], grad: &[E], [momentum]: [&mut [E]; 1]) {
        E::lion(self, param, grad, momentum);
    }

    #[cfg(feature = "cube")]
    fn on_device(&self) -> (StepFormula, StepScalars) {
        let Self { beta_1, beta_2, .. } = *self;
        let scalars = StepScalars {
            factor: product(self.factors),
            lr: self.lr as f32,
            decay: self.decay as f32,
            kept: [beta_1, beta_2],
            added: [1.0 - beta_1, 1.0 - beta_2],
            ..StepScalars::default()
        };
        (StepFormula::Lion, scalars)
    }
}

impl FusedPass<0> for SgdStep {
    fn chunk<E: loops::Element>(&self, param: &mut [E], grad: &[E], []: [&mut [E]; 0]) {
        E::sgd(self, param, grad);
    }

    #[cfg(feature = "cube")]
    fn on_device(&self) -> (StepFormula, StepScalars) {
        let scalars = StepScalars {
            factor: product(self.factors),
            lr: self.lr as f32,
            penalty: self.penalty.unwrap_or(0.0),
            ..StepScalars::default()
        };
        (StepFormula::Sgd, scalars)
    }
}

/// A step of stochastic gradient descent with momentum.
pub(super) struct MomentumStep {
    pub(super) sgd: SgdStep,
    pub(super) momentum: Momentum,
}

impl FusedPass<1> for MomentumStep {
    fn chunk<E: loops::Element>(&self, param: &mut [E], grad: &[E], [velocity]: [&mut [E]; 1]) {
        E::sgd_with_momentum(&self.sgd, &self.momentum, param, grad, velocity);
    }

    #[cfg(feature = "cube")]
    fn on_device(&self) -> (StepFormula, StepScalars) {
        let Momentum {
            momentum,
            dampening,
            nesterov,
        } = self.momentum;
        let (_, scalars) = self.sgd.on_device();
        let scalars = StepScalars {
            kept: [momentum, 0.0],
            added: [(1.0 - dampening) as f32, 0.0],
            ..scalars
        };
        (StepFormula::Momentum(nesterov), scalars)
    }
}
