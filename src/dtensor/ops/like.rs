//! Constant tensors with the shape, type and sharding of another tensor.
//!
//! | `x` | the result |
//! |---|---|
//! | `R`, `S(d)` | as `x` |
//! | `P(op)` | `R` |

use std::sync::Arc;

use burn::tensor::{ElementConversion, Tensor};

use super::placements::R;
use crate::dtensor::{DTensor, DTensorSpec, Kind};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Returns zeros in the shape of this tensor, as burn's
    /// [`zeros_like`](burn::tensor::Tensor::zeros_like).
    #[must_use]
    #[track_caller]
    pub fn zeros_like(&self) -> Self {
        self.like(self.local.zeros_like())
    }

    /// Returns ones in the shape of this tensor, as burn's
    /// [`ones_like`](burn::tensor::Tensor::ones_like).
    #[must_use]
    #[track_caller]
    pub fn ones_like(&self) -> Self {
        self.like(self.local.ones_like())
    }

    /// Returns a tensor with the shape of this one and unspecified values, as burn's
    /// [`empty_like`](burn::tensor::Tensor::empty_like).
    #[must_use]
    pub fn empty_like(&self) -> Self {
        self.like(self.local.empty_like())
    }

    /// Returns a tensor with the shape of this one, filled with one value, as burn's
    /// [`full_like`](burn::tensor::Tensor::full_like).
    #[must_use]
    #[track_caller]
    pub fn full_like<E: ElementConversion>(&self, fill_value: E) -> Self {
        self.like(self.local.full_like(fill_value))
    }

    /// Makes the DTensor of `local`. All its elements are equal, so it is not partial.
    fn like(&self, local: Tensor<D, K>) -> Self {
        Self::from_parts(local, self.reduced_spec())
    }

    /// Returns the spec of this tensor after its partial values are reduced.
    pub(in crate::dtensor) fn reduced_spec(&self) -> Arc<DTensorSpec> {
        if !self.layout().has_partial() {
            return self.spec.clone();
        }
        let layout = self
            .layout()
            .replaced(|_, own| if own.partial_op().is_some() { R } else { own });
        let layout = layout.expect("replacing partial placements keeps the shards and their order");
        DTensorSpec::decided(self.mesh(), layout, self.shape(), self.dtype()).shared()
    }
}
