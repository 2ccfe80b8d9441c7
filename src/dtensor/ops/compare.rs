//! Comparisons, and the questions whether numbers are finite.
//!
//! Their results are Bool, where `P(min)` is an "and" of the ranks' values. An extremum is NaN where
//! one term is, and a comparison with NaN is false: an "and" says so too, an "or" may not. So `x > c`
//! goes through `P(min)` alone, and `x < c` makes a `P(min)` of a `P(max)`.

use burn::tensor::{Bool, Element, ElementConversion, kind};

use super::placements::{MAX, MIN};
use super::pointwise::{NOTHING, Pointwise, Table, map, mapped, zip, zipped};
use crate::dtensor::{DTensor, Kind};

/// Whether it is more: every term of a minimum is.
const MORE: Table = Table::new(&[(&[MIN], MIN)]);
/// Whether it is less: every term of a maximum is.
const LESS: Table = Table::new(&[(&[MAX], MIN)]);

macro_rules! scalars {
    ($E:ident: $($name:ident $alias:ident: $table:expr),* $(,)?) => {$(
        #[doc = concat!("Elementwise, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        pub fn $name<E: $E>(self, other: E) -> DTensor<D, Bool> {
            map(const { Pointwise::new(stringify!($name), $table) }, self, |x| x.$name(other))
        }

        #[doc = concat!("[`", stringify!($name), "`](Self::", stringify!($name), ").")]
        #[must_use]
        pub fn $alias<E: $E>(self, other: E) -> DTensor<D, Bool> {
            self.$name(other)
        }
    )*};
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    zipped! { DTensor<D, Bool>; equal: NOTHING, not_equal: NOTHING }

    scalars! { Element: equal_scalar equal_elem: NOTHING, not_equal_scalar not_equal_elem: NOTHING }
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    zipped! {
        DTensor<D, Bool>;
        greater: NOTHING,
        greater_equal: NOTHING,
        lower: NOTHING,
        lower_equal: NOTHING,
    }

    scalars! {
        ElementConversion:
        greater_scalar greater_elem: MORE,
        greater_equal_scalar greater_equal_elem: MORE,
        lower_scalar lower_elem: LESS,
        lower_equal_scalar lower_equal_elem: LESS,
    }
}

impl<const D: usize> DTensor<D> {
    mapped! { DTensor<D, Bool>; is_nan: NOTHING, is_inf: NOTHING, is_finite: NOTHING }

    /// Whether elements differ by no more than `rtol` of the other's size and `atol`, as burn's
    /// [`is_close`](burn::tensor::Tensor::is_close).
    #[must_use]
    pub fn is_close(self, other: Self, rtol: Option<f64>, atol: Option<f64>) -> DTensor<D, Bool> {
        zip(const { Pointwise::new("is_close", NOTHING) }, self, other, |a, b| a.is_close(b, rtol, atol))
    }
}
