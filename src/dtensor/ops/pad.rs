//! Padding.
//!
//! | | input | output |
//! |---|---|---|
//! | dimension not padded | `S(d)` | `S(d)` |
//! | zeros, reflected or edge values | `P(op)` | `P(op)` |
//! | another constant | `P(avg)`, `P(max)`, `P(min)` | the same |

use burn::tensor::ops::PadMode;
use burn::tensor::{IntoPadding, Shape, kind};

use super::args::misfit;
use super::empty::{blank, is_empty};
use super::rows::{PARTIALS, kept, through, through_constant};
use super::{Rule, Strategy, unary};
use crate::Result;
use crate::dtensor::{DTensor, Kind};
use crate::placement::Placement;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Pad<const D: usize> {
    padding: [(usize, usize); D],
    /// `None`: a constant.
    taken: Option<Taken>,
    partials: &'static [Placement],
}

/// What a padding takes from the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Taken {
    /// As many elements as the padding is long, without the edge.
    Reflection,
    /// The element at the edge.
    Edge,
}

impl<const D: usize> Rule for Pad<D> {
    fn name(&self) -> &'static str {
        "pad"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let mut output = inputs[0].clone();
        for (dim, (before, after)) in self.padding.into_iter().enumerate() {
            let (len, longest) = (output[dim], before.max(after));
            let missing = match self.taken {
                _ if longest == 0 => false,
                Some(Taken::Reflection) => longest >= len,
                Some(Taken::Edge) => len == 0,
                None => false,
            };
            if missing {
                let why = format!("dimension {dim} of length {len} is too short to be padded by {longest} of its own");
                return Err(misfit(self.name(), inputs, why));
            }
            output[dim] += before + after;
        }
        Ok(vec![output])
    }

    fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let untouched = (0..D).filter(|&dim| self.padding[dim] == (0, 0));
        kept(1, untouched).chain(through(1, self.partials)).collect()
    }
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// `padding` elements before and after each of the last dimensions, as burn's
    /// [`pad`](burn::tensor::Tensor::pad).
    #[must_use]
    pub fn pad(self, padding: impl IntoPadding<D>, mode: impl Into<PadMode>) -> Self {
        let (padding, mode) = (padding.into_padding(), mode.into());
        let (taken, partials) = match mode {
            PadMode::Constant(value) => (None, through_constant(value == 0.0)),
            PadMode::Reflect => (Some(Taken::Reflection), PARTIALS),
            PadMode::Edge => (Some(Taken::Edge), PARTIALS),
        };
        unary(&Pad { padding, taken, partials }, self, |x, op| {
            if is_empty(op, 0) { blank([x], op.output_shape(0)) } else { x.pad(padding, mode) }
        })
    }
}
