//! Products of vectors.

use burn::tensor::{AsIndex, kind};

use super::args::{dim_of, operand_error};
use super::partial_rules::BILINEAR;
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

const CROSS: EinsumRule =
    EinsumRule::new("cross", "..V.., ..V.. -> ..V..").with_partial_rules(BILINEAR);

impl<const D: usize> DTensor<D> {
    /// Returns the cross product of vectors along `dim`, as burn's
    /// [`cross`](burn::tensor::Tensor::cross).
    #[must_use]
    #[track_caller]
    pub fn cross<Dim: AsIndex>(self, other: Self, dim: Dim) -> Self {
        let dim = dim_of("cross", dim, D);
        if self.dims()[dim] != 3 {
            let why = format!("vectors along dimension {dim} must have 3 elements");
            operand_error("cross", &[self.shape(), other.shape()], why).unwind()
        }
        apply(&CROSS.at([dim]), (self, other), |(a, b), _| a.cross(b, dim))
    }
}

impl<K: Kind + kind::Numeric> DTensor<1, K> {
    /// Returns the dot product of two vectors, as burn's [`dot`](burn::tensor::Tensor::dot).
    #[must_use]
    #[track_caller]
    pub fn dot(self, other: Self) -> Self {
        self.mul(other).sum()
    }
}
