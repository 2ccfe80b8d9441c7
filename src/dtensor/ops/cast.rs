//! Between element types.
//!
//! | from -> to | linear | increasing |
//! |---|---|---|
//! | Float -> a wider Float | yes | yes |
//! | Float -> a narrower Float: what it rounds to one number would share the gradient of the greatest | no | no |
//! | Int -> Float: a sum of integers wraps around, and large ones are rounded | no | yes |
//! | Float -> Int: NaN becomes 0 | no | no |
//! | Bool -> Int, Bool -> Float | | yes |
//! | Int -> Int: a narrower type wraps around | no | no |
//! | a number -> Bool: whether it is not zero | no | no |

use burn::tensor::kind::{self, TensorKind};
use burn::tensor::{Bool, Cast, DType, Float, Int};

use super::partial_rules::{INCREASING, NO_PARTIAL, PartialRules};
use super::placements::{AVG, MAX, MIN, SUM};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

/// Linear and increasing.
const EMBEDDING: PartialRules = PartialRules::same_for_all(&[SUM, AVG, MAX, MIN]);

const WIDENED: EinsumRule = EinsumRule::pointwise("cast", EMBEDDING);
const ORDERED: EinsumRule = EinsumRule::pointwise("cast", INCREASING);
const NEITHER: EinsumRule = EinsumRule::pointwise("cast", NO_PARTIAL);

macro_rules! cast {
    ($K:ident: $to_int:ident) => {
        /// The elements as another type, as burn's [`cast`](burn::tensor::Tensor::cast).
        #[must_use]
        #[track_caller]
        pub fn cast<T: Cast<D, $K>>(self, dtype: T) -> DTensor<D, T::OutputKind>
        where
            T::OutputKind: Kind,
        {
            let rule = if T::OutputKind::KIND == Float::KIND { ORDERED } else { $to_int };
            apply(&rule, self, |x, _| x.cast(dtype))
        }
    };
}

impl<const D: usize> DTensor<D> {
    /// The elements as another type, as burn's [`cast`](burn::tensor::Tensor::cast).
    #[must_use]
    #[track_caller]
    pub fn cast<T: Cast<D, Float> + Into<DType> + Copy>(self, dtype: T) -> DTensor<D, T::OutputKind>
    where
        T::OutputKind: Kind,
    {
        let (from, to): (DType, DType) = (self.dtype(), dtype.into());
        let exact = to.is_float() && (to == from || to.size() > from.size());
        apply(if exact { &WIDENED } else { &NEITHER }, self, |x, _| x.cast(dtype))
    }

    /// The integers towards zero, as burn's [`int`](burn::tensor::Tensor::int).
    #[must_use]
    #[track_caller]
    pub fn int(self) -> DTensor<D, Int> {
        apply(&NEITHER, self, |x, _| x.int())
    }
}

impl<const D: usize> DTensor<D, Int> {
    cast!(Int: NEITHER);

    /// The numbers as floats, as burn's [`float`](burn::tensor::Tensor::float).
    #[must_use]
    #[track_caller]
    pub fn float(self) -> DTensor<D> {
        apply(&ORDERED, self, |x, _| x.float())
    }
}

impl<const D: usize> DTensor<D, Bool> {
    cast!(Bool: ORDERED);

    /// 1 where true and 0 where false, as burn's [`int`](burn::tensor::Tensor::int).
    #[must_use]
    #[track_caller]
    pub fn int(self) -> DTensor<D, Int> {
        apply(&ORDERED, self, |x, _| x.int())
    }

    /// 1 where true and 0 where false, as burn's [`float`](burn::tensor::Tensor::float).
    #[must_use]
    #[track_caller]
    pub fn float(self) -> DTensor<D> {
        apply(&ORDERED, self, |x, _| x.float())
    }
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// Whether elements are not zero, as burn's [`bool`](burn::tensor::Tensor::bool).
    #[must_use]
    #[track_caller]
    pub fn bool(self) -> DTensor<D, Bool> {
        apply(&const { EinsumRule::pointwise("bool", NO_PARTIAL) }, self, |x, _| x.bool())
    }
}
