//! Pointwise operators of one tensor: signs, roundings, powers, exponentials, trigonometry.

use burn::tensor::{ElementConversion, kind};

use super::pointwise::{
    INCREASING, INCREASING_FROM, INCREASING_TO, LINEAR, NEGATION, NOTHING, Pointwise, QUOTIENT, SHIFT, map, mapped,
};
use crate::dtensor::{DTensor, Kind};

macro_rules! scalar {
    ($($name:ident: $table:expr),* $(,)?) => {$(
        #[doc = concat!("Elementwise, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        pub fn $name<E: ElementConversion>(self, other: E) -> Self {
            map(const { Pointwise::new(stringify!($name), $table) }, self, |x| x.$name(other))
        }
    )*};
}

#[allow(clippy::should_implement_trait)] // burn's names; the trait is implemented too
impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    // The sign of NaN is 0.
    mapped! { Self; neg: NEGATION, abs: NOTHING, sign: NOTHING }

    scalar! {
        add_scalar: SHIFT,
        sub_scalar: SHIFT,
        mul_scalar: LINEAR,
        div_scalar: QUOTIENT,
        remainder_scalar: NOTHING,
        powi_scalar: NOTHING,
    }
}

impl<const D: usize> DTensor<D> {
    mapped! {
        Self;
        exp: INCREASING_TO,
        log: INCREASING_FROM,
        log1p: INCREASING_FROM,
        sqrt: INCREASING_FROM,
        square: NOTHING,
        recip: NOTHING,
        erf: INCREASING,
        floor: INCREASING,
        ceil: INCREASING,
        round: INCREASING,
        trunc: INCREASING,
        deg2rad: LINEAR,
        rad2deg: LINEAR,
        sin: NOTHING,
        cos: NOTHING,
        tan: NOTHING,
        sinh: NOTHING,
        cosh: NOTHING,
        tanh: INCREASING,
        asin: NOTHING,
        acos: NOTHING,
        atan: INCREASING,
        asinh: INCREASING,
        acosh: INCREASING_FROM,
        atanh: NOTHING,
    }

    scalar! { powf_scalar: NOTHING }
}
