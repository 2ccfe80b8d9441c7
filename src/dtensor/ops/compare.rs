//! Comparisons, and the questions whether numbers are finite.
//!
//! Their results are Bool, where `P(min)` is an "and" of the ranks' values. An extremum is NaN where
//! one term is, and a comparison with NaN is false: an "and" says so too, an "or" may not. So `x > c`
//! goes through `P(min)` alone, and `x < c` makes a `P(min)` of a `P(max)`.

use burn::tensor::{Bool, Element, ElementConversion, kind};

use super::methods::{mapped, zipped};
use super::partial_rules::{NO_PARTIAL, PartialRules};
use super::placements::{MAX, MIN};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

/// Whether it is more: every term of a minimum is.
const MORE: PartialRules = PartialRules::new(&[(&[MIN], MIN)]);
/// Whether it is less: every term of a maximum is.
const LESS: PartialRules = PartialRules::new(&[(&[MAX], MIN)]);

/// Burn's second names of comparisons with a scalar.
macro_rules! aliases {
    ($Bound:ident; $($alias:ident = $name:ident),* $(,)?) => {$(
        #[doc = concat!("[`", stringify!($name), "`](Self::", stringify!($name), ").")]
        #[must_use]
        #[track_caller]
        pub fn $alias<E: $Bound>(self, other: E) -> DTensor<D, Bool> {
            self.$name(other)
        }
    )*};
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    zipped! { DTensor<D, Bool>; equal: NO_PARTIAL, not_equal: NO_PARTIAL }

    mapped! {
        DTensor<D, Bool>;
        equal_scalar<E: Element>(other): NO_PARTIAL,
        not_equal_scalar<E: Element>(other): NO_PARTIAL,
    }

    aliases! { Element; equal_elem = equal_scalar, not_equal_elem = not_equal_scalar }
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    zipped! {
        DTensor<D, Bool>;
        greater: NO_PARTIAL,
        greater_equal: NO_PARTIAL,
        lower: NO_PARTIAL,
        lower_equal: NO_PARTIAL,
    }

    mapped! {
        DTensor<D, Bool>;
        greater_scalar<E: ElementConversion>(other): MORE,
        greater_equal_scalar<E: ElementConversion>(other): MORE,
        lower_scalar<E: ElementConversion>(other): LESS,
        lower_equal_scalar<E: ElementConversion>(other): LESS,
    }

    aliases! {
        ElementConversion;
        greater_elem = greater_scalar,
        greater_equal_elem = greater_equal_scalar,
        lower_elem = lower_scalar,
        lower_equal_elem = lower_equal_scalar,
    }
}

impl<const D: usize> DTensor<D> {
    mapped! { DTensor<D, Bool>; is_nan: NO_PARTIAL, is_inf: NO_PARTIAL, is_finite: NO_PARTIAL }

    /// Whether elements differ by no more than `rtol` of the other's size and `atol`, as burn's
    /// [`is_close`](burn::tensor::Tensor::is_close).
    #[must_use]
    #[track_caller]
    pub fn is_close(self, other: Self, rtol: Option<f64>, atol: Option<f64>) -> DTensor<D, Bool> {
        let rule = const { EinsumRule::pointwise("is_close", NO_PARTIAL) };
        apply(&rule, (self, other), |(a, b), _| a.is_close(b, rtol, atol))
    }

    /// Whether all elements [are close](Self::is_close), as burn's
    /// [`all_close`](burn::tensor::Tensor::all_close): the same answer on every rank.
    ///
    /// # Collective
    /// Every rank of the mesh.
    #[must_use]
    #[track_caller]
    pub fn all_close(self, other: Self, rtol: Option<f64>, atol: Option<f64>) -> bool {
        self.is_close(other, rtol, atol).all().into_scalar()
    }
}
