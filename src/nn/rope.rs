//! `RotaryEncoding`.

use burn::nn::RotaryEncoding;
use burn::tensor::Shape;

use super::DTensorForward;
use crate::Result;
use crate::dtensor::DTensor;
use crate::dtensor::ops::{Rule, Strategy, strategy, unary};
use crate::placement::Placement::Shard;

/// Rotates pairs of the last dimension by an angle that grows along the one before: any dimension
/// but the last may be sharded.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Rotary;

impl Rule for Rotary {
    fn name(&self) -> &'static str {
        "rotary encoding"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        Ok(inputs.to_vec())
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        (0..inputs[0].num_dims() - 1).map(|dim| strategy([Shard(dim)], [Shard(dim)])).collect()
    }
}

/// A part of a sharded sequence is rotated by its place in the whole.
impl<const D: usize> DTensorForward<DTensor<D>> for RotaryEncoding {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        unary(&Rotary, x, |x, op| match x.shape().num_elements() {
            0 => x,
            _ => self.apply(x, op.input_range(0, D - 2).start),
        })
    }
}
