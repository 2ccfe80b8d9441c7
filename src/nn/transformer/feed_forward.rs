//! Forward of `PositionWiseFeedForward` over DTensors.

use burn::nn::transformer::PositionWiseFeedForward;

use crate::dtensor::DTensor;
use crate::nn::DTensorForward;

/// If the activation has parameters, they are not distributed: burn does not expose them to module
/// visitors, so records, optimizers and `parallelize` miss them too.
impl<const D: usize> DTensorForward<DTensor<D>> for PositionWiseFeedForward {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        let hidden = self
            .activation
            .forward_dtensor(self.linear_inner.forward_dtensor(x));
        self.linear_outer
            .forward_dtensor(self.dropout.forward_dtensor(hidden))
    }
}
