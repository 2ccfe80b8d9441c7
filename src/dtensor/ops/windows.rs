//! burn's [`Tensor::unfold`](burn::tensor::Tensor::unfold): windows along a dimension. The
//! dimension must not be sharded, because windows reach over the boundaries of shards.
//! `module::unfold4d`, which makes columns of the blocks of images, is in
//! [`unfold`](super::unfold).

use burn::tensor::{AsIndex, Shape};

use super::args::{dim_of, operand_error};
use super::partial_rules::MOVED;
use super::placements::S;
use super::{ShardingRule, Strategy, apply, strategy};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

/// Windows of `size` elements, one every `step` elements of `dim`.
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
        shape[dim] = shape[dim]
            .checked_sub(size)
            .map_or(0, |last| last / step + 1);
        shape.push(size);
        Ok(vec![shape.into()])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let others = (0..inputs[0].num_dims()).filter(|dim| *dim != self.dim);
        others
            .map(|dim| strategy([S(dim)], [S(dim)]))
            .chain(MOVED.rows(1, 1))
            .collect()
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Returns all complete windows of `size` elements along `dim`, one every `step` elements, as
    /// burn's [`Tensor::unfold`](burn::tensor::Tensor::unfold). In the result, `dim` is the
    /// dimension of the windows, and a new last dimension contains their elements. For blocks of
    /// images, see [`module::unfold4d`](crate::dtensor::ops::module::unfold4d).
    #[must_use]
    #[track_caller]
    pub fn unfold<const D2: usize, I: AsIndex>(
        self,
        dim: I,
        size: usize,
        step: usize,
    ) -> DTensor<D2, K> {
        let dim = dim_of("unfold", dim, D);
        if D2 != D + 1 || size == 0 || step == 0 {
            let why = format!(
                "the result has {} dimensions, but {D2} were requested. Windows have at least 1 element, not {size}, \
                 and are at least 1 apart, not {step}",
                D + 1
            );
            operand_error("unfold", &[self.shape()], why).unwind();
        }
        apply(&Unfold { dim, size, step }, self, |x, _| {
            x.unfold(dim, size, step)
        })
    }
}
