//! Logic on Bool, and on the bits of Int.
//!
//! On Bool, "and" is the minimum and "or" the maximum, so they accept `P(min)` and `P(max)`.

use std::ops::{BitAnd, BitOr, BitXor, Not};

use burn::tensor::{Bool, ElementConversion, Int};

use super::methods::{mapped, zipped};
use super::partial_rules::{CONJUNCTION, DECREASING, DISJUNCTION, NO_PARTIAL};
use super::{EinsumRule, apply};
use crate::dtensor::DTensor;

impl<const D: usize> DTensor<D, Bool> {
    mapped! { Self; bool_not: DECREASING }

    zipped! { Self; bool_and: CONJUNCTION, bool_or: DISJUNCTION, bool_xor: NO_PARTIAL }
}

impl<const D: usize> DTensor<D, Int> {
    mapped! { Self; bitwise_not: DECREASING }

    zipped! {
        Self;
        bitwise_and: NO_PARTIAL,
        bitwise_or: NO_PARTIAL,
        bitwise_xor: NO_PARTIAL,
        bitwise_left_shift: NO_PARTIAL,
        bitwise_right_shift: NO_PARTIAL,
    }

    mapped! {
        Self;
        bitwise_and_scalar<E: ElementConversion>(other): NO_PARTIAL,
        bitwise_or_scalar<E: ElementConversion>(other): NO_PARTIAL,
        bitwise_xor_scalar<E: ElementConversion>(other): NO_PARTIAL,
        bitwise_left_shift_scalar<E: ElementConversion>(other): NO_PARTIAL,
        bitwise_right_shift_scalar<E: ElementConversion>(other): NO_PARTIAL,
    }
}

macro_rules! operators {
    ($($Trait:ident $method:ident $named:ident),* $(,)?) => {$(
        impl<const D: usize> $Trait for DTensor<D, Bool> {
            type Output = Self;

            #[track_caller]
            fn $method(self, other: Self) -> Self {
                self.$named(other)
            }
        }
    )*};
}

operators! { BitAnd bitand bool_and, BitOr bitor bool_or, BitXor bitxor bool_xor }

impl<const D: usize> Not for DTensor<D, Bool> {
    type Output = Self;

    #[track_caller]
    fn not(self) -> Self {
        self.bool_not()
    }
}
