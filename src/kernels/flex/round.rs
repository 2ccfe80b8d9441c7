//! Rounding of floats to narrower types: to nearest, ties to even.

use half::bf16;

/// Converts `value` to single precision, exactly.
#[inline(always)]
pub(crate) fn widen_bf16(value: bf16) -> f32 {
    f32::from_bits((value.to_bits() as u32) << 16)
}

/// Rounds to nearest, ties to even. It has no branches and uses a signed shift, so that it vectorizes.
/// `bf16::from_f32` does not.
#[inline(always)]
pub(crate) fn round_to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet_nan = bits | 0x40_0000;
    let wide = if value.is_nan() { quiet_nan } else { nearest };
    bf16::from_bits((wide as i32 >> 16) as i16 as u16)
}

/// Rounds to odd: if single precision cannot represent a value, returns the one of its two neighbours whose last
/// bit is 1.
///
/// Rounding the result to half precision is then equivalent to rounding once. With rounding to nearest, the
/// intermediate value could become a tie that the original value is not.
#[inline(always)]
pub(super) fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    if nearest as f64 == value || nearest.is_nan() {
        return nearest;
    }
    let beyond = (nearest as f64).abs() > value.abs();
    f32::from_bits((nearest.to_bits() - beyond as u32) | 1)
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn bf16_rounds_as_half_does() {
        let near = |bits: u32| [bits.wrapping_sub(1), bits, bits.wrapping_add(1)];
        let edges =
            (0..=u16::MAX).flat_map(|high| [0u32, 0x7fff, 0x8000, 0x8001].map(|low| ((high as u32) << 16) | low));
        for value in edges.flat_map(near).map(f32::from_bits) {
            assert_eq!(round_to_bf16(value).to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
        }
    }

    /// Tests values at and next to the middle of two neighbours, which are distinguished in double precision.
    #[test]
    fn doubles_round_to_half_precision_once() {
        for bits in (0..0x7bff_u16).step_by(7) {
            let [low, high] = [bits, bits + 1].map(f16::from_bits);
            let even = if bits % 2 == 0 { low } else { high };
            let middle = (low.to_f64() + high.to_f64()) / 2.0;
            for (value, expected) in [(middle.next_down(), low), (middle, even), (middle.next_up(), high)] {
                assert_eq!(f16::from_f32(round_to_odd(value)), expected, "{value:e}");
                assert_eq!(f16::from_f32(round_to_odd(-value)), -expected, "-{value:e}");
            }
        }
        for bits in (0..0x7f7f_u16).step_by(7) {
            let [low, high] = [bits, bits + 1].map(bf16::from_bits);
            let even = if bits % 2 == 0 { low } else { high };
            let middle = (low.to_f64() + high.to_f64()) / 2.0;
            for (value, expected) in [(middle.next_down(), low), (middle, even), (middle.next_up(), high)] {
                assert_eq!(round_to_bf16(round_to_odd(value)), expected, "{value:e}");
                assert_eq!(round_to_bf16(round_to_odd(-value)), -expected, "-{value:e}");
            }
        }
        assert!(round_to_odd(f64::NAN).is_nan());
        assert_eq!([1e300, f64::INFINITY].map(|value| round_to_bf16(round_to_odd(value))), [bf16::INFINITY; 2]);
    }
}
