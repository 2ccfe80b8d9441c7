//! [`ExactOnShards`]: which optimizers make of a shard what they make of the whole.

use burn::grad_clipping::GradientClipping;
use burn::optim::{
    AdaGrad, AdaGradConfig, Adam, AdamConfig, AdamW, AdamWConfig, Adan, AdanConfig, Lion, LionConfig, Optimizer,
    RmsProp, RmsPropConfig, Sgd, SgdConfig,
};

/// An optimizer, or the configuration of one, that works element by element: it makes of a shard what it makes of the
/// whole, to the bit, and needs nothing of other ranks. What [`sharded`](super::sharded) takes.
///
/// Of burn's these are `Sgd`, `Adam`, `AdamW`, `AdaGrad`, `RmsProp`, `Adan` and `Lion`. Not `Lamb`, `Adafactor` and
/// `LBFGS`, which look at whole parameters or at all of them, and not `Muon`, which has
/// [`with_muon`](super::ShardedOptimizer::with_muon) in its place:
///
/// ```compile_fail,E0277
/// use burn::optim::MuonConfig;
/// use burn_dtensor::optim::sharded;
///
/// let optim = sharded(MuonConfig::new());
/// ```
///
/// An optimizer of one's own that works element by element says so:
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
    message = "`{Self}` is not known to make of a shard what it makes of a whole parameter",
    label = "may look at more than an element",
    note = "in the place of `Muon`: `sharded(AdamWConfig::new()).with_muon(matrices, MuonConfig::new())`",
    note = "in the place of `Lamb`, `Adafactor` and `LBFGS`: `sharded(AdamWConfig::new())`, or keep parameters whole with \
            `Placement::Replicate`; parameters that are DTensors are stepped by a `DTensorOptimizer`",
    note = "clipping by the norm of all gradients is `clip_grad_norm`'s",
    note = "for an optimizer of your own that works element by element, implement `ExactOnShards`"
)]
pub trait ExactOnShards {
    /// What steps a parameter.
    type Optimizer: Optimizer;

    /// The optimizer, and how it clips gradients first.
    fn build(self) -> (Self::Optimizer, Option<GradientClipping>);
}

macro_rules! exact {
    ($($config:ty => $optimizer:ty),* $(,)?) => {$(
        impl ExactOnShards for $optimizer {
            type Optimizer = Self;

            fn build(self) -> (Self, Option<GradientClipping>) {
                (self, None)
            }
        }

        impl ExactOnShards for $config {
            type Optimizer = $optimizer;

            fn build(self) -> ($optimizer, Option<GradientClipping>) {
                // The configuration's own field is private.
                (<$config>::build(&self), self.init().grad_clipping().cloned())
            }
        }
    )*};
}

exact! {
    SgdConfig => Sgd,
    AdamConfig => Adam,
    AdamWConfig => AdamW,
    AdaGradConfig => AdaGrad,
    RmsPropConfig => RmsProp,
    AdanConfig => Adan,
    LionConfig => Lion,
}
