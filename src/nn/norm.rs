//! Normalization layers.

use burn::module::Param;
use burn::nn::{GroupNorm, LayerNorm, RmsNorm};

use super::{DTensorForward, read, styled};
use crate::dtensor::DTensor;
use crate::dtensor::ops::{Operand, module};

/// Under sequence parallelism gamma and beta get a term of their gradient on every rank; all those
/// of a unit are added up at once.
impl<const D: usize> DTensorForward<DTensor<D>> for LayerNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        styled(&self.gamma, x, |x, gamma| {
            let beta = self.beta.as_ref().map(read);
            module::layer_norm_by(x, gamma, beta, |x, gamma, beta| {
                // burn keeps the layer's epsilon to itself: the layer computes, with what it is given.
                let mut layer = self.clone();
                layer.gamma = Param::initialized(layer.gamma.id, gamma);
                layer.beta = layer.beta.zip(beta).map(|(own, beta)| Param::initialized(own.id, beta));
                layer.forward(x)
            })
        })
    }
}

/// As [`LayerNorm`].
impl<const D: usize> DTensorForward<DTensor<D>> for RmsNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        styled(&self.gamma, x, |x, gamma| module::rms_norm(x, gamma, self.epsilon))
    }
}

/// Of whole groups of channels each rank may hold some.
impl<const D: usize> DTensorForward<DTensor<D>> for GroupNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let normalized = |x: Operand<D>, gamma_beta| module::group_norm(x, gamma_beta, self.num_groups, self.epsilon);
        match (&self.gamma, &self.beta) {
            (Some(gamma), Some(beta)) => styled(gamma, x, |x, gamma| normalized(x, Some((gamma, read(beta))))),
            _ => normalized(x.into(), None),
        }
    }
}
