//! Between element types.
//!
//! | from -> to | linear | increasing |
//! |---|---|---|
//! | Float -> a wider Float | yes | yes |
//! | Float -> a narrower Float: rounds | no | yes |
//! | Int -> Float: a sum of integers wraps around, and large ones are rounded | no | yes |
//! | Float -> Int: rounds towards zero | no | yes |
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
const ROUNDED: Pointwise = Pointwise::new("cast", INCREASING);
const WITHIN_INT: Pointwise = Pointwise::new("cast", NOTHING);

macro_rules! cast {
    ($K:ident: $to_int:ident) => {
        /// The elements as another type, as burn's [`cast`](burn::tensor::Tensor::cast).
        #[must_use]
        pub fn cast<T: Cast<D, $K>>(self, dtype: T) -> DTensor<D, T::OutputKind>
        where
            T::OutputKind: Kind,
        {
            let rule = if T::OutputKind::KIND == Float::KIND { ROUNDED } else { $to_int };
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
        map(if exact { WIDENED } else { ROUNDED }, self, |x| x.cast(dtype))
    }

    /// The integers towards zero, as burn's [`int`](burn::tensor::Tensor::int).
    #[must_use]
    pub fn int(self) -> DTensor<D, Int> {
        map(ROUNDED, self, |x| x.int())
    }
}

impl<const D: usize> DTensor<D, Int> {
    cast!(Int: WITHIN_INT);

    /// The numbers as floats, as burn's [`float`](burn::tensor::Tensor::float).
    #[must_use]
    pub fn float(self) -> DTensor<D> {
        map(ROUNDED, self, |x| x.float())
    }
}

impl<const D: usize> DTensor<D, Bool> {
    cast!(Bool: ROUNDED);

    /// 1 where true and 0 where false, as burn's [`int`](burn::tensor::Tensor::int).
    #[must_use]
    pub fn int(self) -> DTensor<D, Int> {
        map(ROUNDED, self, |x| x.int())
    }

    /// 1 where true and 0 where false, as burn's [`float`](burn::tensor::Tensor::float).
    #[must_use]
    pub fn float(self) -> DTensor<D> {
        map(ROUNDED, self, |x| x.float())
    }
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// Whether elements are not zero, as burn's [`bool`](burn::tensor::Tensor::bool).
    #[must_use]
    pub fn bool(self) -> DTensor<D, Bool> {
        map(const { Pointwise::new("bool", NOTHING) }, self, |x| x.bool())
    }
}
