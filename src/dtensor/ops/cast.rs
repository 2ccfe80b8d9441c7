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

use super::placements::{AVG, MAX, MIN, SUM};
use super::pointwise::{INCREASING, NOTHING, Pointwise, Table, map};
use crate::dtensor::{DTensor, Kind};

/// Linear and increasing.
const EMBEDDING: Table = Table::new(&[(&[SUM], SUM), (&[AVG], AVG), (&[MAX], MAX), (&[MIN], MIN)]);

const WIDENED: Pointwise = Pointwise::new("cast", EMBEDDING);
const ORDERED: Pointwise = Pointwise::new("cast", INCREASING);
const NEITHER: Pointwise = Pointwise::new("cast", NOTHING);

macro_rules! cast {
    ($K:ident: $to_int:ident) => {
        /// The elements as another type, as burn's [`cast`](burn::tensor::Tensor::cast).
        #[must_use]
        pub fn cast<T: Cast<D, $K>>(self, dtype: T) -> DTensor<D, T::OutputKind>
        where
            T::OutputKind: Kind,
        {
            let rule = if T::OutputKind::KIND == Float::KIND { ORDERED } else { $to_int };
            map(rule, self, |x| x.cast(dtype))
        }
    };
}

impl<const D: usize> DTensor<D> {
    /// The elements as another type, as burn's [`cast`](burn::tensor::Tensor::cast).
    #[must_use]
    pub fn cast<T: Cast<D, Float> + Into<DType> + Copy>(self, dtype: T) -> DTensor<D, T::OutputKind>
    where
        T::OutputKind: Kind,
    {
        let (from, to): (DType, DType) = (self.dtype(), dtype.into());
        let exact = to.is_float() && (to == from || to.size() > from.size());
        map(if exact { WIDENED } else { NEITHER }, self, |x| x.cast(dtype))
    }

    /// The integers towards zero, as burn's [`int`](burn::tensor::Tensor::int).
    #[must_use]
    pub fn int(self) -> DTensor<D, Int> {
        map(NEITHER, self, |x| x.int())
    }
}

impl<const D: usize> DTensor<D, Int> {
    cast!(Int: NEITHER);

    /// The numbers as floats, as burn's [`float`](burn::tensor::Tensor::float).
    #[must_use]
    pub fn float(self) -> DTensor<D> {
        map(ORDERED, self, |x| x.float())
    }
}

impl<const D: usize> DTensor<D, Bool> {
    cast!(Bool: ORDERED);

    /// 1 where true and 0 where false, as burn's [`int`](burn::tensor::Tensor::int).
    #[must_use]
    pub fn int(self) -> DTensor<D, Int> {
        map(ORDERED, self, |x| x.int())
    }

    /// 1 where true and 0 where false, as burn's [`float`](burn::tensor::Tensor::float).
    #[must_use]
    pub fn float(self) -> DTensor<D> {
        map(ORDERED, self, |x| x.float())
    }
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// Whether elements are not zero, as burn's [`bool`](burn::tensor::Tensor::bool).
    #[must_use]
    pub fn bool(self) -> DTensor<D, Bool> {
        map(const { Pointwise::new("bool", NOTHING) }, self, |x| x.bool())
    }
}
