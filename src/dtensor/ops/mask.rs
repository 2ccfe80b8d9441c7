//! Selection by a mask.
//!
//! Every element of the result is one of two values, so partial values are accepted if both inputs
//! have the same reduction. A scalar is its own average, maximum and minimum, but its own sum only
//! if it is zero.
//!
//! | | | mask | value | |
//! |---|---|---|---|---|
//! | `mask_where` | `P(op)` | `R` | `P(op)` | `P(op)` |
//! | `mask_fill` | `P(avg)`, `P(max)`, `P(min)` | `R` | | as the input |
//! | `mask_fill` with 0 | `P(sum)` | `R` | | `P(sum)` |

use burn::tensor::{Bool, ElementConversion};

use super::args::operand_error;
use super::partial_rules::PartialRules;
use super::placements::{AVG, MAX, MIN, PRODUCT, R, SUM};
use super::{EinsumRule, apply, replicated};
use crate::dtensor::{DTensor, Kind};

const CHOSEN: PartialRules = PartialRules::new(&[
    (&[SUM, R, SUM], SUM),
    (&[AVG, R, AVG], AVG),
    (&[MAX, R, MAX], MAX),
    (&[MIN, R, MIN], MIN),
    (&[PRODUCT, R, PRODUCT], PRODUCT),
]);
const FILLED: PartialRules = PartialRules::of_first(&[AVG, MAX, MIN]);
const FILLED_WITH_ZERO: PartialRules = PartialRules::of_first(&[SUM, AVG, MAX, MIN]);

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Replaces the elements at which the mask is true by those of `value`, as burn's
    /// [`mask_where`](burn::tensor::Tensor::mask_where).
    #[must_use]
    #[track_caller]
    pub fn mask_where(self, mask: DTensor<D, Bool>, value: Self) -> Self {
        let rule = const { EinsumRule::pointwise("mask_where", CHOSEN) };
        apply(&rule, (self, mask, value), |(x, mask, value), _| {
            x.mask_where(mask, value)
        })
    }

    /// Sets the elements at which the mask is true to `value`, as burn's
    /// [`mask_fill`](burn::tensor::Tensor::mask_fill).
    #[must_use]
    #[track_caller]
    pub fn mask_fill<E: ElementConversion + Copy>(self, mask: DTensor<D, Bool>, value: E) -> Self {
        let partials = if value.elem::<f64>() == 0.0 {
            FILLED_WITH_ZERO
        } else {
            FILLED
        };
        apply(
            &EinsumRule::pointwise("mask_fill", partials),
            (self, mask),
            |(x, mask), _| x.mask_fill(mask, value),
        )
    }

    /// Returns the elements at which `mask` is true, as burn's
    /// [`mask_select`](burn::tensor::Tensor::mask_select): `[count]`. The count depends on the
    /// values, so both inputs are gathered first ([`replicated`]).
    #[must_use]
    #[track_caller]
    pub fn mask_select(self, mask: DTensor<D, Bool>) -> DTensor<1, K> {
        if self.dims() != mask.dims() {
            let why = "the mask must have the shape of the tensor";
            operand_error("mask_select", &[self.shape(), mask.shape()], why).unwind();
        }
        replicated("mask_select", (self, mask), |(x, mask)| x.mask_select(mask))
    }
}
