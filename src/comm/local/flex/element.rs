//! [`Element`]: what can be reduced, and in which precision.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Arithmetic of a reduction.
pub(super) trait Number: Copy + Default {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// The smaller one; NaN if either is.
    fn least(self, other: Self) -> Self;
    /// The larger one; NaN if either is.
    fn greatest(self, other: Self) -> Self;
    fn over(self, count: usize) -> Self;
}

macro_rules! float_number {
    ($($float:ty),*) => {$(
        impl Number for $float {
            #[inline]
            fn plus(self, other: Self) -> Self { self + other }
            #[inline]
            fn times(self, other: Self) -> Self { self * other }
            #[inline]
            fn least(self, other: Self) -> Self { if self < other || self.is_nan() { self } else { other } }
            #[inline]
            fn greatest(self, other: Self) -> Self { if self > other || self.is_nan() { self } else { other } }
            #[inline]
            fn over(self, count: usize) -> Self { self / count as Self }
        }
    )*};
}

macro_rules! int_number {
    ($($int:ty: $wide:ty),*) => {$(
        impl Number for $int {
            #[inline]
            fn plus(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline]
            fn times(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline]
            fn least(self, other: Self) -> Self { self.min(other) }
            #[inline]
            fn greatest(self, other: Self) -> Self { self.max(other) }
            #[inline]
            fn over(self, count: usize) -> Self { (self as $wide / count as $wide) as Self }
        }
    )*};
}

float_number!(f32, f64);
int_number!(i64: i64, i32: i64, i16: i64, i8: i64, u64: u64, u32: u64, u16: u64, u8: u64);

/// A stored element and the type it accumulates in.
pub(super) trait Element: bytemuck::Pod + Send + Sync {
    type Sum: Number;

    /// `source` in accumulation precision: itself, or converted into `scratch`.
    fn widen<'a>(source: &'a [Self], scratch: &'a mut [Self::Sum]) -> &'a [Self::Sum];

    /// Appends `sums`, rounded once.
    fn append(sums: &[Self::Sum], out: &mut Vec<Self>);
}

macro_rules! same_precision {
    ($($number:ty),*) => {$(
        impl Element for $number {
            type Sum = Self;
            #[inline]
            fn widen<'a>(source: &'a [Self], _scratch: &'a mut [Self]) -> &'a [Self] { source }
            #[inline]
            fn append(sums: &[Self], out: &mut Vec<Self>) { out.extend_from_slice(sums) }
        }
    )*};
}

macro_rules! half_precision {
    ($($half:ty),*) => {$(
        impl Element for $half {
            type Sum = f32;
            fn widen<'a>(source: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
                let scratch = &mut scratch[..source.len()];
                source.convert_to_f32_slice(scratch);
                scratch
            }
            fn append(sums: &[f32], out: &mut Vec<Self>) {
                let start = out.len();
                out.resize(start + sums.len(), Self::ZERO);
                out[start..].convert_from_f32_slice(sums);
            }
        }
    )*};
}

same_precision!(f32, f64, i64, i32, i16, i8, u64, u32, u16, u8);
half_precision!(f16, bf16);
