//! [`Element`]: the element types that can be reduced, with their accumulation types.

use std::mem::MaybeUninit;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::memory::HostTuning;

/// Arithmetic of a reduction.
pub(super) trait ReduceElement: Copy + Default {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// Returns the smaller value; NaN if either is NaN.
    fn least(self, other: Self) -> Self;
    /// Returns the larger value; NaN if either is NaN.
    fn greatest(self, other: Self) -> Self;
    fn over(self, count: usize) -> Self;
}

macro_rules! float_number {
    ($($float:ty),*) => {$(
        impl ReduceElement for $float {
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn times(self, other: Self) -> Self { self * other }
            #[inline(always)]
            fn least(self, other: Self) -> Self { if self < other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn greatest(self, other: Self) -> Self { if self > other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn over(self, count: usize) -> Self { self / count as Self }
        }
    )*};
}

macro_rules! int_number {
    ($($int:ty),*) => {$(
        impl ReduceElement for $int {
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn times(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn least(self, other: Self) -> Self { self.min(other) }
            #[inline(always)]
            fn greatest(self, other: Self) -> Self { self.max(other) }
            #[inline(always)]
            fn over(self, count: usize) -> Self { self / count as Self }
        }
    )*};
}

float_number!(f32, f64);
int_number!(i64, u64);

/// A stored element type, with the type in which it is accumulated. Outputs have the length of the
/// sources.
pub(super) trait Element: bytemuck::Pod + Send + Sync {
    type Sum: ReduceElement;

    /// Converts an element to the accumulation type, exactly.
    fn widen(self) -> Self::Sum;

    /// Rounds a result to this type.
    fn narrow(sum: Self::Sum) -> Self;

    /// Returns `source` in the accumulation type. If a conversion is necessary, writes it to
    /// `scratch` and returns `None`.
    #[inline(always)]
    fn widen_all<'a>(source: &'a [Self], scratch: &mut [Self::Sum]) -> Option<&'a [Self::Sum]> {
        scratch
            .iter_mut()
            .zip(source)
            .for_each(|(wide, narrow)| *wide = narrow.widen());
        None
    }

    /// Combines two sources and writes the result to the start of `sums`.
    #[inline(always)]
    fn pair(
        left: &[Self],
        right: &[Self],
        combine: impl Fn(Self::Sum, Self::Sum) -> Self::Sum,
        sums: &mut [Self::Sum],
    ) {
        for ((sum, left), right) in sums.iter_mut().zip(left).zip(right) {
            *sum = combine(left.widen(), right.widen());
        }
    }

    /// Writes `combine(left, right)`, rounded once.
    #[inline(always)]
    fn write(
        left: &[Self::Sum],
        right: &[Self::Sum],
        combine: impl Fn(Self::Sum, Self::Sum) -> Self::Sum,
        out: &mut [MaybeUninit<Self>],
    ) {
        put(
            out,
            left.iter()
                .zip(right)
                .map(|(left, right)| Self::narrow(combine(*left, *right))),
        );
    }

    /// Like [`write`](Self::write), directly from two sources, for a reduction over two ranks.
    #[inline(always)]
    fn write_pair(
        left: &[Self],
        right: &[Self],
        combine: impl Fn(Self::Sum, Self::Sum) -> Self::Sum,
        out: &mut [MaybeUninit<Self>],
    ) {
        put(
            out,
            left.iter()
                .zip(right)
                .map(|(left, right)| Self::narrow(combine(left.widen(), right.widen()))),
        );
    }
}

/// Writes `values` to `out`, up to its length.
#[inline(always)]
fn put<E>(out: &mut [MaybeUninit<E>], values: impl Iterator<Item = E>) {
    for (out, value) in out.iter_mut().zip(values) {
        out.write(value);
    }
}

macro_rules! same_precision {
    ($($number:ty),*) => {$(
        impl Element for $number {
            type Sum = Self;
            #[inline(always)]
            fn widen(self) -> Self { self }
            #[inline(always)]
            fn narrow(sum: Self) -> Self { sum }
            #[inline(always)]
            fn widen_all<'a>(source: &'a [Self], _scratch: &mut [Self]) -> Option<&'a [Self]> { Some(source) }
        }
    )*};
}

same_precision!(f32, f64, i64, u64);

/// Implements [`Element`] for narrow integers, which accumulate in 64 bits, so that a sum does not
/// wrap around before it is divided. The low bits of sums and products equal those of narrow
/// arithmetic.
macro_rules! narrow_int {
    ($($int:ty: $wide:ty),*) => {$(
        impl Element for $int {
            type Sum = $wide;
            #[inline(always)]
            fn widen(self) -> $wide { self.into() }
            #[inline(always)]
            fn narrow(sum: $wide) -> Self { sum as Self }
        }
    )*};
}

narrow_int!(i32: i64, i16: i64, i8: i64, u32: u64, u16: u64, u8: u64);

impl Element for bf16 {
    type Sum = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    /// Rounds to nearest, ties to even. It has no branches and uses a signed shift, so that it
    /// vectorizes. `bf16::from_f32` does not.
    #[inline(always)]
    fn narrow(sum: f32) -> Self {
        let bits = sum.to_bits();
        let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        let quiet_nan = bits | 0x40_0000;
        let wide = if sum.is_nan() { quiet_nan } else { nearest };
        Self::from_bits((wide as i32 >> 16) as i16 as u16)
    }
}

const LANES: usize = HostTuning::CONVERTED;

/// Converts many elements at once, with the instructions of the processor.
impl Element for f16 {
    type Sum = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn narrow(sum: f32) -> Self {
        Self::from_f32(sum)
    }

    fn widen_all<'a>(source: &'a [Self], scratch: &mut [f32]) -> Option<&'a [f32]> {
        source.convert_to_f32_slice(&mut scratch[..source.len()]);
        None
    }

    #[inline(always)]
    fn pair(left: &[Self], right: &[Self], combine: impl Fn(f32, f32) -> f32, sums: &mut [f32]) {
        let sums = &mut sums[..left.len()];
        left.convert_to_f32_slice(sums);
        let mut b = [0.0; LANES];
        for (right, sums) in right.chunks(LANES).zip(sums.chunks_mut(LANES)) {
            let b = &mut b[..right.len()];
            right.convert_to_f32_slice(b);
            sums.iter_mut()
                .zip(b)
                .for_each(|(sum, b)| *sum = combine(*sum, *b));
        }
    }

    #[inline(always)]
    fn write(
        left: &[f32],
        right: &[f32],
        combine: impl Fn(f32, f32) -> f32,
        out: &mut [MaybeUninit<Self>],
    ) {
        let mut sums = [0.0; LANES];
        let mut rounded = [Self::ZERO; LANES];
        for ((left, right), out) in left
            .chunks(LANES)
            .zip(right.chunks(LANES))
            .zip(out.chunks_mut(LANES))
        {
            for ((sum, left), right) in sums.iter_mut().zip(left).zip(right) {
                *sum = combine(*left, *right);
            }
            let rounded = &mut rounded[..left.len()];
            rounded.convert_from_f32_slice(&sums[..left.len()]);
            put(out, rounded.iter().copied());
        }
    }

    #[inline(always)]
    fn write_pair(
        left: &[Self],
        right: &[Self],
        combine: impl Fn(f32, f32) -> f32,
        out: &mut [MaybeUninit<Self>],
    ) {
        let mut a = [0.0; LANES];
        let mut b = [0.0; LANES];
        for ((left, right), out) in left
            .chunks(LANES)
            .zip(right.chunks(LANES))
            .zip(out.chunks_mut(LANES))
        {
            let a = &mut a[..left.len()];
            let b = &mut b[..left.len()];
            left.convert_to_f32_slice(a);
            right.convert_to_f32_slice(b);
            Self::write(a, b, &combine, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_wins() {
        assert!(f32::NAN.least(1.0).is_nan() && 1f32.least(f32::NAN).is_nan());
        assert!(f32::NAN.greatest(1.0).is_nan() && 1f32.greatest(f32::NAN).is_nan());
        assert_eq!((1f32.least(2.0), 1f32.greatest(2.0)), (1.0, 2.0));
    }
    #[test]
    fn bf16_rounds_as_half_does() {
        let near = |bits: u32| [bits.wrapping_sub(1), bits, bits.wrapping_add(1)];
        let edges = (0..=u16::MAX)
            .flat_map(|high| [0u32, 0x7fff, 0x8000, 0x8001].map(|low| ((high as u32) << 16) | low));
        for value in edges.flat_map(near).map(f32::from_bits) {
            assert_eq!(
                bf16::narrow(value).to_bits(),
                bf16::from_f32(value).to_bits(),
                "{value:e}"
            );
        }
    }
}
