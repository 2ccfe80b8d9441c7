//! [`GradFactor`]: factors of gradients that a step applies while it reads them.

use std::cell::{Cell, RefCell};
use std::collections::{HashSet, VecDeque};

use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::autodiff;

/// Factors by which a step multiplies all gradients, one after the other, as it reads them:
/// [`ShardedOptimizer::step_scaled`](super::ShardedOptimizer::step_scaled).
///
/// [`GradScaler::factor`](crate::fsdp::GradScaler::factor) and
/// [`ClipGradNorm::factor`](crate::fsdp::ClipGradNorm::factor) return them. Where a step reads each
/// gradient once, this saves the passes over all gradients of `unscale` and `clip`, on the CPU with
/// the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[must_use = "gradients are unscaled or clipped only if `step_scaled` gets the factor"]
pub struct GradFactor {
    /// `None` for 1.
    factors: Option<[f64; 3]>,
}

impl GradFactor {
    /// Returns the factor that leaves gradients as they are.
    pub fn one() -> Self {
        Self::default()
    }

    /// Returns this factor, followed by another one. Up to three are applied one after the other;
    /// further ones are multiplied with the third.
    pub fn then(self, factor: f64) -> Self {
        let mut factors = self.factors.unwrap_or([1.0; 3]);
        match factors.iter_mut().find(|free| **free == 1.0) {
            Some(free) => *free = factor,
            None => factors[2] *= factor,
        }
        Self {
            factors: (factors != [1.0; 3]).then_some(factors),
        }
    }

    /// Returns the product of the factors.
    pub fn value(&self) -> f64 {
        self.factors.map_or(1.0, |factors| factors.iter().product())
    }

    pub(super) fn factors(self) -> burn_dtensor_optim::Factors {
        self.factors
    }

    /// Multiplies the gradients of `model`.
    pub(crate) fn scale_all<M: Module>(self, model: &M, grads: &mut GradientsParams) {
        if self != Self::one() {
            model.visit(&mut ScaleVisitor {
                grads,
                factor: self,
                seen: HashSet::new(),
            });
        }
    }

    /// Multiplies a gradient.
    pub(crate) fn scale<const D: usize>(self, grad: Tensor<D>) -> Tensor<D> {
        let factors = self.factors.into_iter().flatten();
        factors
            .filter(|factor| *factor != 1.0)
            .fold(grad, Tensor::mul_scalar)
    }
}

struct ScaleVisitor<'a> {
    grads: &'a mut GradientsParams,
    factor: GradFactor,
    /// Parameters that were visited: a clone in the model has the ids of the original.
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for ScaleVisitor<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.seen.insert(param.id)
            && let Some(grad) = self.grads.remove::<D>(param.id)
        {
            self.grads.register(param.id, self.factor.scale(grad));
        }
    }
}

thread_local! {
    /// The factor of the gradients of the step that runs on this thread.
    static CURRENT: Cell<GradFactor> = const { Cell::new(GradFactor { factors: None }) };
    /// The last losses that scalers have scaled on this thread.
    static SCALED: RefCell<VecDeque<NodeId>> = const { RefCell::new(VecDeque::new()) };
}

/// Most scaled losses that are remembered: more than a step has.
const SCALED_LOSSES: usize = 1024;

/// Records that a scaler has scaled this loss.
pub(crate) fn note_scaled<const D: usize>(loss: &Tensor<D>) {
    if let Some(node) = autodiff::node_id(loss.clone().into_dispatch()) {
        SCALED.with_borrow_mut(|scaled| {
            scaled.push_back(node);
            if scaled.len() > SCALED_LOSSES {
                scaled.pop_front();
            }
        });
    }
}

/// Returns the last losses that scalers have scaled.
pub(super) fn scaled_losses() -> HashSet<NodeId> {
    SCALED.with_borrow(|scaled| scaled.iter().copied().collect())
}

/// Makes a step whose gradients are multiplied by `factor`.
pub(super) fn scaled_by<T>(factor: GradFactor, step: impl FnOnce() -> T) -> T {
    /// Restores the factor, also if burn panics.
    struct FactorBefore(GradFactor);

    impl Drop for FactorBefore {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }

    let _before = FactorBefore(CURRENT.replace(factor));
    step()
}

/// Returns the factor of the gradients of the step that runs on this thread.
pub(super) fn current() -> GradFactor {
    CURRENT.get()
}
