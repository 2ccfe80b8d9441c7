//! Tensors of one value, of the shape, the type and the shards of another.
//!
//! | `x` | the result |
//! |---|---|
//! | `R`, `S(d)` | the same |
//! | `P(op)` | `R` |

use std::sync::Arc;

use burn::tensor::{ElementConversion, Tensor};

use super::placements::R;
use crate::dtensor::{DTensor, DTensorSpec, Kind};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Zeros like this tensor, as burn's [`zeros_like`](burn::tensor::Tensor::zeros_like).
    #[must_use]
    #[track_caller]
    pub fn zeros_like(&self) -> Self {
        self.like(self.local.zeros_like())
    }

    /// Ones like this tensor, as burn's [`ones_like`](burn::tensor::Tensor::ones_like).
    #[must_use]
    #[track_caller]
    pub fn ones_like(&self) -> Self {
        self.like(self.local.ones_like())
    }

    /// A tensor like this one, of any values, as burn's [`empty_like`](burn::tensor::Tensor::empty_like).
    #[must_use]
    pub fn empty_like(&self) -> Self {
        self.like(self.local.empty_like())
    }

    /// One value like this tensor, as burn's [`full_like`](burn::tensor::Tensor::full_like).
    #[must_use]
    #[track_caller]
    pub fn full_like<E: ElementConversion>(&self, fill_value: E) -> Self {
        self.like(self.local.full_like(fill_value))
    }

    /// A local tensor whose elements are all the same needs no reduction.
    fn like(&self, local: Tensor<D, K>) -> Self {
        Self::from_parts(local, self.reduced_spec())
    }

    /// The spec of a tensor like this one, reduced.
    pub(super) fn reduced_spec(&self) -> Arc<DTensorSpec> {
        if !self.layout().has_partial() {
            return self.spec.clone();
        }
        let layout = self.layout().replaced(|_, own| if own.partial_op().is_some() { R } else { own });
        let layout = layout.expect("the shards and their order stay");
        DTensorSpec::decided(self.mesh(), layout, self.shape(), self.dtype()).shared()
    }
}
