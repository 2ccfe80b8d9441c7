//! Forward of `RotaryEncoding` and `PositionalEncoding` over DTensors.

use burn::nn::{PositionalEncoding, RotaryEncoding};

use super::DTensorForward;
use crate::dtensor::DTensor;
use crate::dtensor::ops::partial_rules::SHIFT;
use crate::dtensor::ops::{EinsumRule, apply, operand_error};

/// Sharding rule of the rotary encoding, which rotates pairs of elements of the last dimension by
/// an angle that grows along the one before.
const ROTARY: EinsumRule = EinsumRule::new("rotary encoding", "..sD -> ..sD");
/// Sharding rule of the positional encoding, which adds a value that depends on the position in the
/// sequence.
const POSITIONAL: EinsumRule =
    EinsumRule::new("positional encoding", "bsd -> bsd").with_partial_rules(SHIFT);

/// A shard of a sequence is rotated by its positions in the full sequence.
impl<const D: usize> DTensorForward<DTensor<D>> for RotaryEncoding {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        // Burn clamps a slice of the table that ends after it, and a rank whose shard fits would
        // not fail.
        let [longest, width, _] = self.freq_complex.dims();
        let dims = x.dims();
        if !matches!(dims[..], [.., seq, last] if seq <= longest && last == width) {
            let why = format!(
                "the layer encodes at most {longest} tokens of width {width}. Pass `[.., seq, {width}]`"
            );
            operand_error("rotary encoding", &[x.shape()], why).unwind();
        }
        apply(&ROTARY, x, |x, op| {
            self.apply(x, op.input_range(0, D - 2).start)
        })
    }
}

/// A shard of a sequence is encoded by its positions in the full sequence.
impl DTensorForward<DTensor<3>> for PositionalEncoding {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, x: DTensor<3>) -> DTensor<3> {
        let [_, seq, width] = x.dims();
        let [_, longest, d_model] = self.sinusoids.dims();
        if seq > longest || width != d_model {
            let why = format!("the layer encodes at most {longest} tokens of width {d_model}");
            operand_error("positional encoding", &[x.shape()], why).unwind();
        }
        apply(&POSITIONAL, x, |x, op| {
            let sinusoids = self.sinusoids.clone().to_device(&x.device());
            x + sinusoids.slice([0..1, op.input_range(0, 1), op.input_range(0, 2)])
        })
    }
}
