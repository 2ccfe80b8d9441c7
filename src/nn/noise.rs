//! Layers that draw random numbers in training: `GaussianNoise` and `RRelu`.
//!
//! The numbers depend on the thread's [stream of seeds](crate::dtensor::ops::random) and on each
//! element's index in the full tensor, as for `Dropout`. They are the same on every mesh.

use burn::nn::GaussianNoise;
use burn::nn::activation::RRelu;
use burn::tensor::Distribution;

use super::DTensorForward;
use crate::dtensor::DTensor;
use crate::dtensor::ops::activation::leaky_relu;

impl<const D: usize> DTensorForward<DTensor<D>> for GaussianNoise {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        if !self.training.is_enabled() || !x.local().is_autodiff() || self.std == 0.0 {
            return x;
        }
        let noise = x.random_like(Distribution::Normal(0.0, self.std));
        x + noise
    }
}

impl<const D: usize> DTensorForward<DTensor<D>> for RRelu {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        if !self.training.is_enabled() || !x.local().is_autodiff() || self.lower == self.upper {
            return leaky_relu(x, (self.lower + self.upper) / 2.0);
        }
        let slopes = x.random_like(Distribution::Uniform(self.lower, self.upper));
        let negative = x.clone().lower_scalar(0.0);
        let scaled = x.clone() * slopes;
        x.mask_where(negative, scaled)
    }
}
