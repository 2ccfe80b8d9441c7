//! Indices of the true elements of a mask. Their number depends on the values, so the mask is
//! gathered first ([`replicated`]) and every rank finds all of them.

use burn::tensor::{Bool, Int, Tensor};

use super::replicated;
use crate::dtensor::DTensor;

impl<const D: usize> DTensor<D, Bool> {
    /// Returns the indices of all true elements in row-major order, as burn's
    /// [`argwhere`](Tensor::argwhere): `[count, D]`, Replicate.
    #[must_use]
    #[track_caller]
    pub fn argwhere(self) -> DTensor<2, Int> {
        replicated("argwhere", self, Tensor::argwhere)
    }

    /// Returns the indices of all true elements, as burn's [`nonzero`](Tensor::nonzero): a
    /// Replicate tensor `[count]` for each dimension, or an empty list if no element is true.
    #[must_use]
    #[track_caller]
    pub fn nonzero(self) -> Vec<DTensor<1, Int>> {
        replicated("nonzero", self, Tensor::nonzero)
    }
}
