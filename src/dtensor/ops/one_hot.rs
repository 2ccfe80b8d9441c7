//! One-hot encodings.

use burn::tensor::{AsIndex, Tensor, kind};

use super::args::{dim_of, operand_error};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

const ONE_HOT: EinsumRule = EinsumRule::new("one_hot", ".. -> ..C..");

#[track_caller]
fn encode<const D: usize, const D2: usize, K: Kind + kind::Ordered>(
    x: DTensor<D, K>,
    classes: usize,
    axis: usize,
    local: impl FnOnce(Tensor<D, K>) -> Tensor<D2, K>,
) -> DTensor<D2, K> {
    if D2 != D + 1 || classes < 2 {
        let why = format!(
            "the result has {} dimensions, not {D2}, and at least 2 classes, not {classes}",
            D + 1
        );
        operand_error("one_hot", &[x.shape()], why).unwind();
    }
    apply(&ONE_HOT.at([axis]).lens([classes]), x, |x, _| local(x))
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    /// Encodes each element as a vector with 1 at its class, along a new last dimension, as burn's
    /// [`one_hot`](Tensor::one_hot).
    #[must_use]
    #[track_caller]
    pub fn one_hot<const D2: usize>(self, num_classes: usize) -> DTensor<D2, K> {
        encode(self, num_classes, D, |x| x.one_hot(num_classes))
    }

    /// Encodes each element as a vector with `on_value` at its class and `off_value` elsewhere,
    /// along a new dimension `axis`, as burn's [`one_hot_fill`](Tensor::one_hot_fill).
    #[must_use]
    #[track_caller]
    pub fn one_hot_fill<const D2: usize>(
        self,
        num_classes: usize,
        on_value: f32,
        off_value: f32,
        axis: impl AsIndex,
    ) -> DTensor<D2, K> {
        let axis = dim_of("one_hot_fill", axis, D + 1);
        encode(self, num_classes, axis, |x| {
            x.one_hot_fill(num_classes, on_value, off_value, axis)
        })
    }
}
