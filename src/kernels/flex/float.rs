//! [`Float`]: types that can be cast, and the precision of the arithmetic.

use burn::tensor::Element;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::round::{round_to_bf16, round_to_odd, widen_bf16};

/// A precision for arithmetic.
pub(super) trait Wide: bytemuck::Pod + Send + Sync {
    fn of(scale: f32) -> Self;
    fn times(self, other: Self) -> Self;
    fn plus(self, other: Self) -> Self;
}

/// A stored float type with arithmetic in `W`. Converts slices of equal length, and rounds at most once.
pub(super) trait Float<W: Wide>: bytemuck::Pod + Element {
    fn widen(from: &[Self], to: &mut [W]);
    fn round(from: &[W], to: &mut [Self]);
}

#[inline(always)]
fn each<A: Copy, B>(from: &[A], to: &mut [B], convert: impl Fn(A) -> B) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = convert(*from);
    }
}

macro_rules! floats {
    ($($float:ty as $wide:ty: $widen:expr, $round:expr;)*) => {$(
        impl Float<$wide> for $float {
            #[inline(always)]
            fn widen(from: &[Self], to: &mut [$wide]) { each(from, to, $widen) }
            #[inline(always)]
            fn round(from: &[$wide], to: &mut [Self]) { each(from, to, $round) }
        }
    )*};
}

floats! {
    f32 as f32: |value| value, |value| value;
    bf16 as f32: widen_bf16, round_to_bf16;
    f64 as f64: |value| value, |value| value;
    f32 as f64: f64::from, |value| value as f32;
    bf16 as f64: |value| widen_bf16(value).into(), |value| round_to_bf16(round_to_odd(value));
    f16 as f64: |value| value.to_f64(), |value| f16::from_f32(round_to_odd(value));
}

impl Float<f32> for f16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn round(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

macro_rules! wide {
    ($($float:ty),*) => {$(
        impl Wide for $float {
            #[inline(always)]
            fn of(scale: f32) -> Self { scale.into() }
            #[inline(always)]
            fn times(self, other: Self) -> Self { self * other }
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self + other }
        }
    )*};
}

wide!(f32, f64);
