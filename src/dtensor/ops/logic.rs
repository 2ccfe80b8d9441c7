//! Logic on Bool, and on the bits of Int.
//!
//! On Bool, "and" is the minimum and "or" the maximum, which is how they go through `P(min)` and
//! `P(max)`.

use std::ops::{BitAnd, BitOr, BitXor, Not};

use burn::tensor::{Bool, ElementConversion, Int};

use super::pointwise::{DECREASING, MAXIMUM, MINIMUM, NOTHING, Pointwise, map, mapped, zip, zipped};
use crate::dtensor::DTensor;

macro_rules! scalars {
    ($($name:ident),* $(,)?) => {$(
        #[doc = concat!("Elementwise, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        pub fn $name(self, other: impl ElementConversion) -> Self {
            map(const { Pointwise::new(stringify!($name), NOTHING) }, self, |x| x.$name(other))
        }
    )*};
}

impl<const D: usize> DTensor<D, Bool> {
    mapped! { Self; bool_not: DECREASING }

    zipped! { Self; bool_and: MINIMUM, bool_or: MAXIMUM, bool_xor: NOTHING }
}

impl<const D: usize> DTensor<D, Int> {
    mapped! { Self; bitwise_not: DECREASING }

    zipped! {
        Self;
        bitwise_and: NOTHING,
        bitwise_or: NOTHING,
        bitwise_xor: NOTHING,
        bitwise_left_shift: NOTHING,
        bitwise_right_shift: NOTHING,
    }

    scalars! {
        bitwise_and_scalar,
        bitwise_or_scalar,
        bitwise_xor_scalar,
        bitwise_left_shift_scalar,
        bitwise_right_shift_scalar,
    }
}

macro_rules! operators {
    ($($Trait:ident $method:ident $named:ident),* $(,)?) => {$(
        impl<const D: usize> $Trait for DTensor<D, Bool> {
            type Output = Self;

            fn $method(self, other: Self) -> Self {
                self.$named(other)
            }
        }
    )*};
}

operators! { BitAnd bitand bool_and, BitOr bitor bool_or, BitXor bitxor bool_xor }

impl<const D: usize> Not for DTensor<D, Bool> {
    type Output = Self;

    fn not(self) -> Self {
        self.bool_not()
    }
}
