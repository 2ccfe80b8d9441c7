//! Single numbers, read by the program: the same on every rank.

use burn::tensor::Element;

use super::args::operand_error;
use crate::dtensor::{DTensor, Kind};
use crate::error::OrUnwind;

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The one element, as burn's [`into_scalar`](burn::tensor::Tensor::into_scalar), whole where the tensor is
    /// partial.
    ///
    /// # Collective
    /// Every rank of the mesh, unless the tensor is Replicate.
    ///
    /// # Panics
    /// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if there is not exactly one.
    #[must_use]
    #[track_caller]
    pub fn into_scalar<E: Element>(self) -> E {
        if self.shape().num_elements() != 1 {
            operand_error("into_scalar", &[self.shape()], "it is of one element; reduce the tensor first").unwind();
        }
        self.full_tensor().or_unwind().into_scalar()
    }
}
