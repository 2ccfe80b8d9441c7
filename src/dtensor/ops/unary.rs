//! Pointwise operators of one tensor: signs, roundings, powers, exponentials, trigonometry.

use burn::tensor::{ElementConversion, kind};

use super::pointwise::{DECREASING, INCREASING, LINEAR, NEGATION, NOTHING, Pointwise, SHIFT, map};
use crate::dtensor::{DTensor, Kind};

/// Methods that do to a DTensor what burn's method of that name does to a tensor.
macro_rules! unary {
    ($($name:ident: $table:expr),* $(,)?) => {$(
        #[doc = concat!("Elementwise, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        pub fn $name(self) -> Self {
            map(const { Pointwise::new(stringify!($name), $table) }, self, |x| x.$name())
        }
    )*};
}

macro_rules! scalar {
    ($($name:ident: $table:expr),* $(,)?) => {$(
        #[doc = concat!("Elementwise, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        pub fn $name<E: ElementConversion>(self, other: E) -> Self {
            map(const { Pointwise::new(stringify!($name), $table) }, self, |x| x.$name(other))
        }
    )*};
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    unary! { neg: NEGATION, abs: NOTHING, sign: INCREASING }

    scalar! {
        add_scalar: SHIFT,
        sub_scalar: SHIFT,
        mul_scalar: LINEAR,
        div_scalar: LINEAR,
        remainder_scalar: NOTHING,
        powi_scalar: NOTHING,
    }
}

impl<const D: usize> DTensor<D> {
    unary! {
        exp: INCREASING,
        log: INCREASING,
        log1p: INCREASING,
        sqrt: INCREASING,
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
        sinh: INCREASING,
        cosh: NOTHING,
        tanh: INCREASING,
        asin: INCREASING,
        acos: DECREASING,
        atan: INCREASING,
        asinh: INCREASING,
        acosh: INCREASING,
        atanh: INCREASING,
    }

    scalar! { powf_scalar: NOTHING }
}
