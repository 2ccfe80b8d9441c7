//! Casts between element types.
//!
//! | from -> to | linear | increasing |
//! |---|---|---|
//! | Float -> a wider Float | yes | yes |
//! | Float -> a narrower Float: values rounded to one number would share the gradient of the greatest | no | no |
//! | Int -> Float: a sum of integers wraps around, and large ones are rounded | no | yes |
//! | Float -> Int: NaN becomes 0 | no | no |
//! | Bool -> Int, Bool -> Float | | yes |
//! | Int -> Int: a narrower type wraps around | no | no |
//! | a number -> Bool: true unless it is zero | no | no |

use burn::tensor::kind::{self, TensorKind};
use burn::tensor::{Bool, Cast, DType, Float, Int};

use super::partial_rules::{INCREASING, NO_PARTIAL, PartialRules};
use super::placements::{AVG, MAX, MIN, SUM};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

/// Rules for a linear and increasing cast.
const EMBEDDING: PartialRules = PartialRules::same_for_all(&[SUM, AVG, MAX, MIN]);

const WIDENED: EinsumRule = EinsumRule::pointwise("cast", EMBEDDING);
const ORDERED: EinsumRule = EinsumRule::pointwise("cast", INCREASING);
const NEITHER: EinsumRule = EinsumRule::pointwise("cast", NO_PARTIAL);

macro_rules! cast {
    ($K:ident: $to_int:ident) => {
        /// Converts the elements to another type, as burn's [`cast`](burn::tensor::Tensor::cast).
        #[must_use]
        #[track_caller]
        pub fn cast<T: Cast<D, $K>>(self, dtype: T) -> DTensor<D, T::OutputKind>
        where
            T::OutputKind: Kind,
        {
            let rule = if T::OutputKind::KIND == Float::KIND {
                ORDERED
            } else {
                $to_int
            };
            apply(&rule, self, |x, _| x.cast(dtype))
        }
    };
}

impl<const D: usize> DTensor<D> {
    /// Converts the elements to another type, as burn's [`cast`](burn::tensor::Tensor::cast).
    #[must_use]
    #[track_caller]
    pub fn cast<T: Cast<D, Float> + Into<DType> + Copy>(self, dtype: T) -> DTensor<D, T::OutputKind>
    where
        T::OutputKind: Kind,
    {
        let from: DType = self.dtype();
        let to: DType = dtype.into();
        let exact = to.is_float() && (to == from || to.size() > from.size());
        apply(if exact { &WIDENED } else { &NEITHER }, self, |x, _| {
            x.cast(dtype)
        })
    }

    /// Rounds the elements towards zero to integers, as burn's [`int`](burn::tensor::Tensor::int).
    #[must_use]
    #[track_caller]
    pub fn int(self) -> DTensor<D, Int> {
        apply(&NEITHER, self, |x, _| x.int())
    }
}

impl<const D: usize> DTensor<D, Int> {
    cast!(Int: NEITHER);

    /// Converts the elements to floats, as burn's [`float`](burn::tensor::Tensor::float).
    #[must_use]
    #[track_caller]
    pub fn float(self) -> DTensor<D> {
        apply(&ORDERED, self, |x, _| x.float())
    }
}

impl<const D: usize> DTensor<D, Bool> {
    cast!(Bool: ORDERED);

    /// Converts true to 1 and false to 0, as burn's [`int`](burn::tensor::Tensor::int).
    #[must_use]
    #[track_caller]
    pub fn int(self) -> DTensor<D, Int> {
        apply(&ORDERED, self, |x, _| x.int())
    }

    /// Converts true to 1 and false to 0, as burn's [`float`](burn::tensor::Tensor::float).
    #[must_use]
    #[track_caller]
    pub fn float(self) -> DTensor<D> {
        apply(&ORDERED, self, |x, _| x.float())
    }
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// Returns true for elements that are not zero, as burn's [`bool`](burn::tensor::Tensor::bool).
    #[must_use]
    #[track_caller]
    pub fn bool(self) -> DTensor<D, Bool> {
        apply(
            &const { EinsumRule::pointwise("bool", NO_PARTIAL) },
            self,
            |x, _| x.bool(),
        )
    }
}
