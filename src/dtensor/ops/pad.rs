//! Padding.

use burn::tensor::ops::PadMode;
use burn::tensor::{IntoPadding, kind};

use super::args::operand_error;
use super::partial_rules::{MOVED, MOVED_WITH_CONSTANT};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

const PAD: EinsumRule = EinsumRule::new("pad", ".._.. -> ..D..").with_partial_rules(MOVED);
const PAD_WITH_CONSTANT: EinsumRule = PAD.with_partial_rules(MOVED_WITH_CONSTANT);

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// Pads the last dimensions with `padding` elements before and after, as burn's
    /// [`pad`](burn::tensor::Tensor::pad).
    #[must_use]
    #[track_caller]
    pub fn pad(self, padding: impl IntoPadding<D>, mode: impl Into<PadMode>) -> Self {
        let padding = padding.into_padding();
        let mode = mode.into();
        let padded = |dim: &usize| padding[*dim] != (0, 0);
        for dim in (0..D).filter(padded) {
            let len = self.dims()[dim];
            let longest = padding[dim].0.max(padding[dim].1);
            let is_too_short = match mode {
                PadMode::Constant(_) => false,
                // Reflection needs as many elements as the padding has, excluding the edge.
                PadMode::Reflect => longest >= len,
                PadMode::Edge => len == 0,
            };
            if is_too_short {
                let why = format!(
                    "dimension {dim} of length {len} is too short for padding of {longest} elements"
                );
                operand_error("pad", &[self.shape()], why).unwind()
            }
        }
        let rule = if matches!(mode, PadMode::Constant(value) if value != 0.0) {
            &PAD_WITH_CONSTANT
        } else {
            &PAD
        };
        let lens = (0..D)
            .filter(padded)
            .map(|dim| self.dims()[dim] + padding[dim].0 + padding[dim].1);
        apply(&rule.at((0..D).filter(padded)).lens(lens), self, |x, _| {
            x.pad(padding, mode)
        })
    }
}
