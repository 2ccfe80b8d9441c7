//! Forward of `Linear` and `SwiGlu` over DTensors.

use burn::nn::Linear;
use burn::nn::activation::SwiGlu;

use super::{DTensorForward, apply_style, read_with};
use crate::dtensor::DTensor;
use crate::dtensor::ops::{activation, module};

/// Clones of one input share the communication that redistributes it for layers of the same style.
impl<const D: usize> DTensorForward<DTensor<D>> for Linear {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        apply_style(&self.weight, x, |x, weight| {
            let bias = read_with(&weight, self.bias.as_ref());
            module::linear(x, weight, bias)
        })
    }
}

impl<const D: usize> DTensorForward<DTensor<D>> for SwiGlu {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let gate = activation::silu(self.linear_inner.forward_dtensor(x.clone()));
        gate * self.linear_outer.forward_dtensor(x)
    }
}
