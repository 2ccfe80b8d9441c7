//! Choosing by a mask.
//!
//! Every element of the result is one of two values, whichever way the ranks reduce it, so a
//! pending reduction goes through if both values have it. A filled-in scalar is its own average,
//! maximum and minimum; as a sum it is its own only if it is zero.
//!
//! | | | mask | value | |
//! |---|---|---|---|---|
//! | `mask_where` | `P(op)` | `R` | `P(op)` | `P(op)` |
//! | `mask_fill` | `P(avg)`, `P(max)`, `P(min)` | `R` | | the same |
//! | `mask_fill` with 0 | `P(sum)` | `R` | | `P(sum)` |

use burn::tensor::{Bool, ElementConversion};

use super::placements::{AVG, MAX, MIN, PRODUCT, R, SUM};
use super::pointwise::{Pointwise, Table, zip};
use super::ternary;
use crate::dtensor::{DTensor, Kind};

const WHERE: Table = Table::new(&[
    (&[SUM, R, SUM], SUM),
    (&[AVG, R, AVG], AVG),
    (&[MAX, R, MAX], MAX),
    (&[MIN, R, MIN], MIN),
    (&[PRODUCT, R, PRODUCT], PRODUCT),
]);
const FILL: Table = Table::new(&[(&[AVG, R], AVG), (&[MAX, R], MAX), (&[MIN, R], MIN)]);
const FILL_WITH_ZERO: Table = Table::new(&[(&[SUM, R], SUM), (&[AVG, R], AVG), (&[MAX, R], MAX), (&[MIN, R], MIN)]);

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// `value` where the mask is true, as burn's [`mask_where`](burn::tensor::Tensor::mask_where).
    #[must_use]
    pub fn mask_where(self, mask: DTensor<D, Bool>, value: Self) -> Self {
        let rule = const { Pointwise::new("mask_where", WHERE) };
        ternary(&rule, self, mask, value, |x, mask, value, _| x.mask_where(mask, value))
    }

    /// One value where the mask is true, as burn's [`mask_fill`](burn::tensor::Tensor::mask_fill).
    #[must_use]
    pub fn mask_fill<E: ElementConversion + Copy>(self, mask: DTensor<D, Bool>, value: E) -> Self {
        let rule = match value.elem::<f64>() == 0.0 {
            true => const { Pointwise::new("mask_fill", FILL_WITH_ZERO) },
            false => const { Pointwise::new("mask_fill", FILL) },
        };
        zip(rule, self, mask, |x, mask| x.mask_fill(mask, value))
    }
}
