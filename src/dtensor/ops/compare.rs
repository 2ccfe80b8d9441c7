//! Comparisons, and tests for NaN, infinite and finite numbers.
//!
//! Their results are Bool, where `P(min)` is the logical "and" of the ranks' values. An extremum is
//! NaN if one partial value is, and a comparison with NaN is false. The "and" of the comparisons is
//! then false too, but an "or" may be true. Therefore `x > c` accepts only `P(min)`, and `x < c`
//! turns `P(max)` into `P(min)`.

use burn::tensor::{Bool, Element, ElementConversion, kind};

use super::methods::{mapped, zipped};
use super::partial_rules::{NO_PARTIAL, PartialRules};
use super::placements::{MAX, MIN};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

/// Rules for "greater": a minimum is greater if all partial values are.
const MORE: PartialRules = PartialRules::new(&[(&[MIN], MIN)]);
/// Rules for "less": a maximum is less if all partial values are.
const LESS: PartialRules = PartialRules::new(&[(&[MAX], MIN)]);

/// Defines burn's second names of comparisons with a scalar.
macro_rules! aliases {
    ($Bound:ident; $($alias:ident = $name:ident),* $(,)?) => {$(
        #[doc = concat!("Alias of [`", stringify!($name), "`](Self::", stringify!($name), ").")]
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

    /// Returns true for elements that differ by at most `atol` plus `rtol` times the size of the
    /// other, as burn's [`is_close`](burn::tensor::Tensor::is_close).
    #[must_use]
    #[track_caller]
    pub fn is_close(self, other: Self, rtol: Option<f64>, atol: Option<f64>) -> DTensor<D, Bool> {
        let rule = const { EinsumRule::pointwise("is_close", NO_PARTIAL) };
        apply(&rule, (self, other), |(a, b), _| a.is_close(b, rtol, atol))
    }

    /// Returns true if all elements [are close](Self::is_close), as burn's
    /// [`all_close`](burn::tensor::Tensor::all_close). The result is the same on every rank.
    ///
    /// # Collective
    /// Every rank of the mesh.
    #[must_use]
    #[track_caller]
    pub fn all_close(self, other: Self, rtol: Option<f64>, atol: Option<f64>) -> bool {
        self.is_close(other, rtol, atol).all().into_scalar()
    }
}
