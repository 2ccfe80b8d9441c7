//! Elementwise operators of one tensor: signs, roundings, powers, exponentials, trigonometry,
//! clamping.

use burn::tensor::{ElementConversion, Int, kind};

use super::methods::mapped;
use super::partial_rules::{
    INCREASING, INCREASING_FROM, INCREASING_TO, LINEAR, NEGATION, NO_PARTIAL, QUOTIENT, SHIFT,
};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

#[allow(clippy::should_implement_trait)] // burn's names; the trait is implemented too
impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    mapped! {
        Self;
        neg: NEGATION,
        abs: NO_PARTIAL,
        sign: NO_PARTIAL, // it is 0 for NaN
        add_scalar<E: ElementConversion>(other): SHIFT,
        sub_scalar<E: ElementConversion>(other): SHIFT,
        mul_scalar<E: ElementConversion>(other): LINEAR,
        div_scalar<E: ElementConversion>(other): QUOTIENT,
        remainder_scalar<E: ElementConversion>(other): NO_PARTIAL,
        powi_scalar<E: ElementConversion>(other): NO_PARTIAL,
    }
}

// Clamping is increasing, but extrema must be reduced first: all partial values beyond a bound
// become the bound, and one that equals the bound, where the slope is 1, would share the gradient
// of the greatest.
impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    /// Limits the elements to `min..=max`, as burn's [`clamp`](burn::tensor::Tensor::clamp).
    #[must_use]
    #[track_caller]
    pub fn clamp<E: ElementConversion>(self, min: E, max: E) -> Self {
        apply(
            &const { EinsumRule::pointwise("clamp", NO_PARTIAL) },
            self,
            |x, _| x.clamp(min, max),
        )
    }

    mapped! {
        Self;
        clamp_min<E: ElementConversion>(min): NO_PARTIAL,
        clamp_max<E: ElementConversion>(max): NO_PARTIAL,
    }
}

impl<const D: usize> DTensor<D> {
    mapped! {
        Self;
        exp: INCREASING_TO,
        log: INCREASING_FROM,
        log1p: INCREASING_FROM,
        sqrt: INCREASING_FROM,
        square: NO_PARTIAL,
        recip: NO_PARTIAL,
        erf: INCREASING,
        floor: INCREASING,
        ceil: INCREASING,
        round: INCREASING,
        trunc: INCREASING,
        deg2rad: LINEAR,
        rad2deg: LINEAR,
        sin: NO_PARTIAL,
        cos: NO_PARTIAL,
        tan: NO_PARTIAL,
        sinh: NO_PARTIAL,
        cosh: NO_PARTIAL,
        tanh: INCREASING,
        asin: NO_PARTIAL,
        acos: NO_PARTIAL,
        atan: INCREASING,
        asinh: INCREASING,
        acosh: INCREASING_FROM,
        atanh: NO_PARTIAL,
        powf_scalar<E: ElementConversion>(other): NO_PARTIAL,
    }

    /// Returns the remainder of the division by `scalar`, with the sign of the element, as burn's
    /// [`fmod_scalar`](burn::tensor::Tensor::fmod_scalar).
    #[must_use]
    #[track_caller]
    pub fn fmod_scalar(self, scalar: f32) -> Self {
        apply(
            &const { EinsumRule::pointwise("fmod_scalar", NO_PARTIAL) },
            self,
            |x, _| x.fmod_scalar(scalar),
        )
    }
}

impl<const D: usize> DTensor<D, Int> {
    mapped! { Self; square: NO_PARTIAL }
}
