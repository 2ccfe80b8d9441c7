//! `Linear` and `SwiGlu`.

use burn::nn::Linear;
use burn::nn::activation::SwiGlu;

use super::{DTensorForward, bring, read};
use crate::dtensor::DTensor;
use crate::dtensor::ops::{activation, module};
use crate::param::ParamExt;

/// Clones of one input share the communication that brings it to the layers of one style.
impl<const D: usize> DTensorForward<DTensor<D>> for Linear {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let (style, weight) = (self.weight.style(), read(&self.weight));
        let spec = weight.spec().clone();
        let input = style.and_then(|style| style.input());
        let output = style.and_then(|style| style.output());
        let bias = self.bias.as_ref().map(read);
        bring(module::linear_with_input(x, weight, bias, input), &spec, output)
    }
}

impl<const D: usize> DTensorForward<DTensor<D>> for SwiGlu {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let gate = activation::silu(self.linear_inner.forward_dtensor(x.clone()));
        gate * self.linear_outer.forward_dtensor(x)
    }
}
