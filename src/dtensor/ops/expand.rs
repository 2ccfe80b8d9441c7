//! Expansion and repetition.
//!
//! | | input | output |
//! |---|---|---|
//! | expand, length kept | `S(i)` | `S(o)` |
//! | | `P(op)` | `P(op)` |

use burn::tensor::{AsIndex, BroadcastArgs, Shape};

use super::args::{converted, dim_of, operand_error};
use super::partial_rules::MOVED;
use super::placements::S;
use super::{EinsumRule, ShardingRule, Strategy, apply, strategy};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Expand {
    shape: Shape,
}

impl ShardingRule for Expand {
    fn name(&self) -> &'static str {
        "expand"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let from = &inputs[0];
        let to = &self.shape;
        if from.num_dims() > to.num_dims()
            || !from
                .iter()
                .rev()
                .zip(to.iter().rev())
                .all(|(from, to)| from == to || *from == 1)
        {
            let why = format!("{to} must end with the input's lengths, except where these are 1");
            return Err(operand_error(self.name(), inputs, why));
        }
        Ok(vec![to.clone()])
    }

    fn supports_empty_shards(&self) -> bool {
        true
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let new = outputs[0].num_dims() - inputs[0].num_dims();
        let same = (0..inputs[0].num_dims()).filter(|&dim| inputs[0][dim] == outputs[0][new + dim]);
        same.map(|dim| strategy([S(dim)], [S(new + dim)]))
            .chain(MOVED.rows(1, 1))
            .collect()
    }
}

const REPEAT_DIM: EinsumRule = EinsumRule::new("repeat_dim", ".._.. -> ..D..")
    .with_partial_rules(MOVED)
    .with_empty_shards();

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Broadcasts to `shape`, as burn's [`expand`](burn::tensor::Tensor::expand): dimensions of
    /// length 1 are repeated and new dimensions are added in front. A length of -1 keeps the
    /// input's.
    #[must_use]
    #[track_caller]
    pub fn expand<const D2: usize, S: BroadcastArgs<D, D2>>(self, shape: S) -> DTensor<D2, K> {
        let own = self.shape();
        let why = || {
            format!(
                "the lengths are not those of a broadcast. Pass at least {D} lengths, each at least 1, or -1 to keep a \
                 length of the input"
            )
        };
        let shape = converted("expand", &own, || shape.into_shape(&own), why);
        if shape.num_dims() != D2 {
            let why = format!(
                "the result {shape} has {} dimensions, but {D2} were requested",
                shape.num_dims()
            );
            operand_error("expand", &[own], why).unwind();
        }
        apply(&Expand { shape }, self, |x, op| {
            x.expand(op.output_shape(0).clone())
        })
    }

    /// Repeats the tensor `times` times along `dim`, as burn's
    /// [`repeat_dim`](burn::tensor::Tensor::repeat_dim).
    #[must_use]
    #[track_caller]
    pub fn repeat_dim(self, dim: impl AsIndex, times: usize) -> Self {
        let dim = dim_of("repeat_dim", dim, D);
        let len = self.dims()[dim] * times;
        apply(&REPEAT_DIM.at([dim]).lens([len]), self, |x, _| {
            x.repeat_dim(dim, times)
        })
    }

    /// Repeats the tensor `sizes[d]` times along each dimension `d`, as burn's
    /// [`repeat`](burn::tensor::Tensor::repeat).
    #[must_use]
    #[track_caller]
    pub fn repeat(self, sizes: &[usize]) -> Self {
        let repeated = sizes.iter().enumerate().filter(|(_, times)| **times != 1);
        repeated.fold(self, |x, (dim, &times)| x.repeat_dim(dim, times))
    }
}
