//! [`ExactOnShards`]: optimizers whose step of a shard equals the shard of a step of the full parameter.

use burn::grad_clipping::GradientClipping;
use burn::optim::{
    AdaGrad, AdaGradConfig, Adam, AdamConfig, AdamW, AdamWConfig, Adan, AdanConfig, Lion,
    LionConfig, Optimizer, RmsProp, RmsPropConfig, Sgd, SgdConfig,
};

use super::fused::{FusedAdam, FusedAdamW, FusedLion, FusedSgd};

/// An optimizer, or the configuration of one, that works element by element. Its step of a shard is
/// bitwise equal to the shard of a step of the full parameter, and needs no communication.
/// [`sharded`](super::sharded) accepts these optimizers.
///
/// burn's `Sgd`, `Adam`, `AdamW`, `AdaGrad`, `RmsProp`, `Adan` and `Lion` implement it. `Lamb`,
/// `Adafactor` and `LBFGS` do not, because they need a full parameter or all parameters. `Muon`
/// does not either; use [`with_muon`](super::ShardedOptimizer::with_muon) instead:
///
/// ```compile_fail,E0277
/// use burn::optim::MuonConfig;
/// use burn_dtensor::optim::sharded;
///
/// let optim = sharded(MuonConfig::new());
/// ```
///
/// Implement the trait for a custom optimizer that works element by element. All fields of its state
/// must be there after the second step at the latest.
///
/// ```
/// use burn::grad_clipping::GradientClipping;
/// use burn::optim::{LearningRate, Optimizer};
/// use burn::tensor::{Device, Tensor};
/// use burn_dtensor::optim::{ExactOnShards, sharded};
///
/// #[derive(Clone)]
/// struct SignDescent;
///
/// impl Optimizer for SignDescent {
///     type State<const D: usize> = ();
///     fn step<const D: usize>(
///         &self,
///         lr: LearningRate,
///         param: Tensor<D>,
///         grad: Tensor<D>,
///         _: Option<()>,
///     ) -> (Tensor<D>, Option<()>) {
///         (param - grad.sign() * lr, None)
///     }
///     fn to_device<const D: usize>(state: (), _: &Device) {
///         state
///     }
/// }
///
/// impl ExactOnShards for SignDescent {
///     type Optimizer = Self;
///     fn build(self) -> (Self, Option<GradientClipping>) {
///         (self, None)
///     }
/// }
///
/// let optim = sharded(SignDescent);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not known to step a shard as it would step the full parameter",
    label = "may not work element by element",
    note = "instead of `Muon`, use `sharded(AdamWConfig::new()).with_muon(matrices, MuonConfig::new())`",
    note = "instead of `Lamb`, `Adafactor` and `LBFGS`, use `sharded(AdamWConfig::new())`, or keep parameters \
            replicated with `Placement::Replicate`; for parameters that are DTensors, use a `DTensorOptimizer`",
    note = "to clip by the norm of all gradients, use `clip_grad_norm`",
    note = "for a custom optimizer that works element by element, implement `ExactOnShards`"
)]
pub trait ExactOnShards {
    /// Optimizer that steps a parameter.
    type Optimizer: Optimizer;

    /// Returns the optimizer and its gradient clipping.
    fn build(self) -> (Self::Optimizer, Option<GradientClipping>);
}

macro_rules! exact {
    ($($config:ty => $optimizer:ty, $built:ty = $make:expr;)*) => {$(
        impl ExactOnShards for $optimizer {
            type Optimizer = Self;

            fn build(self) -> (Self, Option<GradientClipping>) {
                (self, None)
            }
        }

        impl ExactOnShards for $config {
            type Optimizer = $built;

            fn build(self) -> ($built, Option<GradientClipping>) {
                // The clipping field of the configuration is private.
                ($make(&self), self.init().grad_clipping().cloned())
            }
        }
    )*};
}

exact! {
    SgdConfig => Sgd, FusedSgd = FusedSgd::from;
    AdamConfig => Adam, FusedAdam = FusedAdam::from;
    AdamWConfig => AdamW, FusedAdamW = FusedAdamW::from;
    AdaGradConfig => AdaGrad, AdaGrad = AdaGradConfig::build;
    RmsPropConfig => RmsProp, RmsProp = RmsPropConfig::build;
    AdanConfig => Adan, Adan = AdanConfig::build;
    LionConfig => Lion, FusedLion = FusedLion::from;
}
