//! `Dropout`.

use burn::nn::Dropout;

use super::DTensorForward;
use crate::dtensor::DTensor;
use crate::dtensor::ops::{module, random};

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
