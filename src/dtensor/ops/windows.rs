//! burn's [`Tensor::unfold`](burn::tensor::Tensor::unfold): windows along a dimension, which is whole on every rank, as
//! they reach over the edge of a shard. Images as columns of blocks, `module::unfold4d`, are in
//! [`unfold`](super::unfold).

use burn::tensor::{AsIndex, Shape};

use super::args::{dim_of, operand_error};
use super::partial_rules::MOVED;
use super::placements::S;
use super::{ShardingRule, Strategy, apply, strategy};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

/// `size` elements at every `step`th place of `dim`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Unfold {
    dim: usize,
    size: usize,
    step: usize,
}

impl ShardingRule for Unfold {
    fn name(&self) -> &'static str {
        "unfold"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let &Self { dim, size, step } = self;
        let mut shape = inputs[0].to_vec();
        shape[dim] = shape[dim].checked_sub(size).map_or(0, |last| last / step + 1);
        shape.push(size);
        Ok(vec![shape.into()])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let others = (0..inputs[0].num_dims()).filter(|dim| *dim != self.dim);
        others.map(|dim| strategy([S(dim)], [S(dim)])).chain(MOVED.rows(1, 1)).collect()
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// All whole windows of `size` elements along `dim`, one every `step` elements, as burn's
    /// [`Tensor::unfold`](burn::tensor::Tensor::unfold): the windows take the place of `dim`, and a last dimension of
    /// their elements comes new. Blocks of images are
    /// [`module::unfold4d`](crate::dtensor::ops::module::unfold4d).
    #[must_use]
    #[track_caller]
    pub fn unfold<const D2: usize, I: AsIndex>(self, dim: I, size: usize, step: usize) -> DTensor<D2, K> {
        let dim = dim_of("unfold", dim, D);
        if D2 != D + 1 || size == 0 || step == 0 {
            let why = format!(
                "it makes {} dimensions, {D2} are asked for, of windows of at least 1 element, not {size}, at least \
                 1 apart, not {step}",
                D + 1
            );
            operand_error("unfold", &[self.shape()], why).unwind();
        }
        apply(&Unfold { dim, size, step }, self, |x, _| x.unfold(dim, size, step))
    }
}
