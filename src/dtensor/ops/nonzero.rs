//! Where a mask is true. How many places there are depends on the values: the mask is made
//! [whole](replicated) first, and every rank finds all of them.

use burn::tensor::{Bool, Int, Tensor};

use super::replicated;
use crate::dtensor::DTensor;

impl<const D: usize> DTensor<D, Bool> {
    /// The indices of all true elements, in row-major order, as burn's [`argwhere`](Tensor::argwhere):
    /// `[as many, D]`, Replicate.
    #[must_use]
    #[track_caller]
    pub fn argwhere(self) -> DTensor<2, Int> {
        replicated("argwhere", self, Tensor::argwhere)
    }

    /// The indices of all true elements, a tensor `[as many]` for each dimension, as burn's
    /// [`nonzero`](Tensor::nonzero): Replicate, and none if no element is true.
    #[must_use]
    #[track_caller]
    pub fn nonzero(self) -> Vec<DTensor<1, Int>> {
        replicated("nonzero", self, Tensor::nonzero)
    }
}
