//! Reading of single numbers by the program. The result is the same on every rank.

use burn::tensor::Element;

use super::args::operand_error;
use crate::dtensor::{DTensor, Kind};
use crate::error::OrUnwind;

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Returns the only element, as burn's [`into_scalar`](burn::tensor::Tensor::into_scalar). A
    /// partial tensor is reduced first.
    ///
    /// # Collective
    /// Every rank of the mesh, unless the tensor is Replicate.
    ///
    /// # Panics
    /// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) unless the
    /// tensor has exactly one element.
    #[must_use]
    #[track_caller]
    pub fn into_scalar<E: Element>(self) -> E {
        if self.shape().num_elements() != 1 {
            operand_error(
                "into_scalar",
                &[self.shape()],
                "it needs one element. Reduce the tensor first",
            )
            .unwind();
        }
        self.full_tensor().or_unwind().into_scalar()
    }
}
