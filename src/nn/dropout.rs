//! `Dropout`, and reproducible dropout for plain tensors.

use burn::nn::Dropout;
use burn::tensor::{Distribution, Tensor};

use super::DTensorForward;
use crate::dtensor::DTensor;
use crate::dtensor::ops::{check_probability, module, random};

/// The mask depends on the calling thread's [stream of seeds](random), on the slice of the root
/// mesh that the tensor's mesh is, and on each element's index in the full tensor. It is therefore
/// the same for every sharding, and data-parallel groups draw different masks. Like burn's own, the
/// layer acts only on tensors with autodiff.
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

/// Applies reproducible dropout to a plain tensor: sets elements of `x` to zero with probability
/// `prob`, and divides the others by `1 - prob`.
///
/// Use it instead of burn's `Dropout` in models that ranks train data parallel. On the CPU, burn's
/// mask comes from one random state that all ranks of the process share, so it depends on timing
/// unless the process has only one rank. Here the mask comes from the rank's [own
/// stream](random::tensor): every rank drops different elements, and the same ones in every run.
/// Local: no communication.
///
/// Like burn's own, it drops nothing outside training, that is, if `x` is on a device without
/// autodiff, as after [`valid`](burn::module::Module::valid). If the layer may be
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
/// Ranks of a tensor-parallel mesh hold the same activation and must drop the same elements. There,
/// make the activation a [`DTensor`] and use the layer's `forward_dtensor`.
///
/// # Panics
/// Unwinds with [`DTensorError::Distribution`](crate::dtensor::DTensorError::Distribution) unless
/// `prob` is in `0..1`, and like [`random::tensor`].
#[must_use]
#[track_caller]
pub fn dropout<const D: usize>(x: Tensor<D>, prob: f64) -> Tensor<D> {
    check_probability(prob);
    if prob == 0.0 || !x.is_autodiff() {
        return x;
    }
    let keep = 1.0 - prob;
    let mask = random::tensor(
        x.shape(),
        Distribution::Bernoulli(keep),
        (&x.device(), x.dtype()),
    );
    x * mask.mul_scalar(1.0 / keep)
}
