//! Arithmetic of two tensors with broadcasting, and Rust's arithmetic operators.

use std::ops::{Add, Div, Mul, Neg, Rem, Sub};

use burn::tensor::{ElementConversion, kind};

use super::methods::zipped;
use super::partial_rules::{ADDITION, BILINEAR, LINEAR_IN_FIRST, MAXIMUM, MINIMUM, NO_PARTIAL};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

#[allow(clippy::should_implement_trait)] // burn's names; the traits are implemented too
impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    zipped! {
        Self;
        add: ADDITION,
        sub: ADDITION,
        mul: BILINEAR,
        div: LINEAR_IN_FIRST,
        remainder: NO_PARTIAL,
        powi: NO_PARTIAL,
    }
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    zipped! { Self; max_pair: MAXIMUM, min_pair: MINIMUM }
}

impl<const D: usize> DTensor<D> {
    zipped! { Self; powf: NO_PARTIAL, atan2: NO_PARTIAL, hypot: NO_PARTIAL, fmod: NO_PARTIAL }
}

/// A number that Rust's operators combine with a [`DTensor`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be combined with a `DTensor`",
    label = "neither a `DTensor` nor a number",
    note = "make a plain tensor a DTensor on the same mesh: `DTensor::distribute_replicated` if every rank holds the \
            full tensor, `DTensor::from_local` if each holds its shard",
    note = "or compute with plain tensors: take this rank's local tensor with `to_local`, or the full tensor with \
            `full_tensor`"
)]
pub trait Scalar: ElementConversion {}

#[diagnostic::do_not_recommend]
impl<E: ElementConversion> Scalar for E {}

macro_rules! operators {
    ($($Trait:ident $method:ident $named:ident $scalar:ident);* $(;)?) => {$(
        impl<const D: usize, K: Kind + kind::Numeric> $Trait for DTensor<D, K> {
            type Output = Self;

            #[track_caller]
            fn $method(self, other: Self) -> Self {
                self.$named(other)
            }
        }

        impl<const D: usize, K: Kind + kind::Numeric, E: Scalar> $Trait<E> for DTensor<D, K> {
            type Output = Self;

            #[track_caller]
            fn $method(self, other: E) -> Self {
                self.$scalar(other)
            }
        }
    )*};
}

operators! {
    Add add add add_scalar;
    Sub sub sub sub_scalar;
    Mul mul mul mul_scalar;
    Div div div div_scalar;
    Rem rem remainder remainder_scalar;
}

impl<const D: usize, K: Kind + kind::Numeric> Neg for DTensor<D, K> {
    type Output = Self;

    #[track_caller]
    fn neg(self) -> Self {
        DTensor::neg(self)
    }
}

/// Implements operators whose left operand is a number.
macro_rules! from_the_left {
    (/ $($ty:ty)*) => {$(
        impl<const D: usize> Div<DTensor<D>> for $ty {
            type Output = DTensor<D>;

            #[track_caller]
            fn div(self, x: DTensor<D>) -> DTensor<D> {
                x.recip().mul_scalar(self)
            }
        }
    )*};
    ($($ty:ty)*) => {$(
        impl<const D: usize, K: Kind + kind::Numeric> Add<DTensor<D, K>> for $ty {
            type Output = DTensor<D, K>;

            #[track_caller]
            fn add(self, x: DTensor<D, K>) -> DTensor<D, K> {
                x.add_scalar(self)
            }
        }

        impl<const D: usize, K: Kind + kind::Numeric> Sub<DTensor<D, K>> for $ty {
            type Output = DTensor<D, K>;

            #[track_caller]
            fn sub(self, x: DTensor<D, K>) -> DTensor<D, K> {
                DTensor::neg(x).add_scalar(self)
            }
        }

        impl<const D: usize, K: Kind + kind::Numeric> Mul<DTensor<D, K>> for $ty {
            type Output = DTensor<D, K>;

            #[track_caller]
            fn mul(self, x: DTensor<D, K>) -> DTensor<D, K> {
                x.mul_scalar(self)
            }
        }
    )*};
}

from_the_left!(f32 f64 i32 i64 u32 u64);
from_the_left!(/ f32 f64);
