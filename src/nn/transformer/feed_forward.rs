//! `PositionWiseFeedForward`.

use burn::nn::transformer::PositionWiseFeedForward;

use crate::dtensor::DTensor;
use crate::nn::DTensorForward;

/// burn shows nobody the parameters of its activation, where that has some: neither records nor optimizers, nor
/// `parallelize`.
impl<const D: usize> DTensorForward<DTensor<D>> for PositionWiseFeedForward {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let hidden = self.activation.forward_dtensor(self.linear_inner.forward_dtensor(x));
        self.linear_outer.forward_dtensor(self.dropout.forward_dtensor(hidden))
    }
}
