//! `Dropout`, and dropout of plain tensors.

use burn::nn::Dropout;
use burn::tensor::{Distribution, Tensor};

use super::DTensorForward;
use crate::dtensor::DTensor;
use crate::dtensor::ops::{check_probability, module, random};

/// The mask depends on the calling thread's [stream of seeds](random), on the slice that the tensor's mesh is,
/// and on the element's place in the whole tensor: it is the same on every mesh, and data-parallel groups have
/// masks of their own. As burn's own, it acts on tensors with autodiff only.
impl<const D: usize> DTensorForward<DTensor<D>> for Dropout {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        if !self.training.is_enabled() || !x.local().is_autodiff() || self.prob == 0.0 {
            return x;
        }
        let seed = random::next_seed_on(x.spec().mesh());
        module::dropout(x, self.prob, seed)
    }
}

/// Dropout of a plain tensor that repeats from run to run: `x` with elements set to zero with probability
/// `prob`, and the others divided by `1 - prob`.
///
/// For models that ranks train in data parallel, in the place of burn's `Dropout`, whose mask on the CPU
/// comes from one random state of all ranks of the process and is a matter of time, unless the process has only one. The
/// mask comes from the rank's [own stream](random::tensor): every rank drops other elements, and the same ones at every
/// run.
///
/// As burn's own, it drops nothing outside of training, which is where `x` is on a device without autodiff,
/// such as what a model computes after [`valid`](burn::module::Module::valid). Where the layer may be
/// [frozen](burn::module::Module::freeze), keep a `Dropout` for its settings:
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Dropout, Linear};
/// use burn::tensor::Tensor;
/// use burn_dtensor::nn::dropout;
///
/// #[derive(Module, Debug)]
/// struct Layer {
///     linear: Linear,
///     dropout: Dropout,
/// }
///
/// impl Layer {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         let x = self.linear.forward(x);
///         if self.dropout.training.is_enabled() { dropout(x, self.dropout.prob) } else { x }
///     }
/// }
/// ```
///
/// Ranks of a tensor-parallel mesh hold one activation and must drop the same of it: there the activation
/// is a [`DTensor`], and the layer's `forward_dtensor` is right.
///
/// # Panics
/// Unwinds with [`DTensorError::Distribution`](crate::dtensor::DTensorError::Distribution) unless `prob` is in `0..1`,
/// and as [`random::tensor`].
#[must_use]
#[track_caller]
pub fn dropout<const D: usize>(x: Tensor<D>, prob: f64) -> Tensor<D> {
    check_probability(prob);
    if prob == 0.0 || !x.is_autodiff() {
        return x;
    }
    let keep = 1.0 - prob;
    let mask = random::tensor(x.shape(), Distribution::Bernoulli(keep), (&x.device(), x.dtype()));
    x * mask.mul_scalar(1.0 / keep)
}
