//! Normalization layers.

use burn::module::{Param, ParamId};
use burn::nn::{GroupNorm, LayerNorm, RmsNorm};

use super::{DTensorForward, bring, read};
use crate::dtensor::DTensor;
use crate::dtensor::ops::module;
use crate::fsdp::ParamExt;

/// Under sequence parallelism gamma and beta get a term of their gradient on every rank; all those
/// of a unit are added up at once.
impl<const D: usize> DTensorForward<DTensor<D>> for LayerNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let (style, gamma) = (self.gamma.style(), read(&self.gamma));
        let spec = gamma.spec().clone();
        let x = bring(x, &spec, style.and_then(|style| style.input()));
        let beta = self.beta.as_ref().map(read);
        let y = module::layer_norm_by(x, gamma, beta, |x, gamma, beta| {
            // burn keeps the layer's epsilon to itself: the layer computes, with what it is given.
            let mut layer = self.clone();
            layer.gamma = Param::initialized(ParamId::new(), gamma);
            layer.beta = beta.map(|beta| Param::initialized(ParamId::new(), beta));
            layer.forward(x)
        });
        bring(y, &spec, style.and_then(|style| style.output()))
    }
}

/// As [`LayerNorm`].
impl<const D: usize> DTensorForward<DTensor<D>> for RmsNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let (style, gamma) = (self.gamma.style(), read(&self.gamma));
        let spec = gamma.spec().clone();
        let x = bring(x, &spec, style.and_then(|style| style.input()));
        let y = module::rms_norm(x, gamma, self.epsilon);
        bring(y, &spec, style.and_then(|style| style.output()))
    }
}

/// Of whole groups of channels each rank may hold some.
impl<const D: usize> DTensorForward<DTensor<D>> for GroupNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let gamma_beta = self.gamma.as_ref().map(read).zip(self.beta.as_ref().map(read));
        module::group_norm(x, gamma_beta, self.num_groups, self.epsilon)
    }
}
