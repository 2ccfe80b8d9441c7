//! Arithmetic of two tensors with broadcasting, and Rust's arithmetic operators.

use std::ops::{Add, Div, Mul, Neg, Rem, Sub};

use burn::tensor::{ElementConversion, Tensor, kind};
use half::{bf16, f16};

use super::methods::zipped;
use super::partial_rules::{ADDITION, BILINEAR, LINEAR_IN_FIRST, MAXIMUM, MINIMUM, NO_PARTIAL};
use super::{EinsumRule, apply};
use crate::Error;
use crate::dtensor::{DTensor, DTensorError, Kind};

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
///
/// A plain tensor of one element is combined like a number; a larger one only as a DTensor
/// ([`replicated_like`](DTensor::replicated_like)).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be combined with a `DTensor`",
    label = "neither a `DTensor` nor a number"
)]
pub trait Scalar: ElementConversion {}

macro_rules! scalars {
    ($($ty:ty)*) => {$( impl Scalar for $ty {} )*};
}

scalars!(f64 f32 f16 bf16 i64 i32 i16 i8 u64 u32 u16 u8);

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Returns a plain tensor of one element as an operand of this tensor: replicated, since every
    /// rank computes the same value.
    #[track_caller]
    fn one_element<const P: usize>(&self, operator: &'static str, plain: Tensor<P, K>) -> Self {
        if plain.shape().num_elements() != 1 {
            let shape = plain.shape().to_vec();
            let mesh = self.mesh().to_string();
            Error::from(DTensorError::PlainTensor {
                operator,
                shape,
                mesh,
            })
            .unwind();
        }
        DTensor::replicated_like(plain.reshape([1; D]), self)
    }
}

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

        /// A plain tensor of one element, whose value is the same on all ranks.
        impl<const D: usize, const P: usize, K: Kind + kind::Numeric> $Trait<Tensor<P, K>> for DTensor<D, K> {
            type Output = Self;

            #[track_caller]
            fn $method(self, other: Tensor<P, K>) -> Self {
                let other = self.one_element(stringify!($named), other);
                self.$named(other)
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
