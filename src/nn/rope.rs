//! `RotaryEncoding`.

use burn::nn::RotaryEncoding;

use super::DTensorForward;
use crate::dtensor::DTensor;
use crate::dtensor::ops::{Axes, apply};

/// Rotates pairs of the last dimension by an angle that grows along the one before.
const ROTARY: Axes = Axes::new("rotary encoding", "..sD -> ..sD");

/// A part of a sharded sequence is rotated by its place in the whole.
impl<const D: usize> DTensorForward<DTensor<D>> for RotaryEncoding {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        apply(&ROTARY, x, |x, op| self.apply(x, op.input_range(0, D - 2).start))
    }
}
