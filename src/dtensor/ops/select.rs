//! Selection of slices by index, and updates of slices. Along a sharded dimension, selection is a
//! masked [lookup](super::lookup), and assignment [updates](super::update) the slices that each
//! rank holds.

use burn::tensor::{AsIndex, IndexingUpdateOp, Int, Shape, Tensor};

use super::args::{dim_of, operand_error};
use super::partial_rules::MOVED_BY;
use super::update::Update;
use super::{EinsumRule, apply, lookup};
use crate::dtensor::local::reshape;
use crate::dtensor::{DTensor, Kind};

const SELECT: EinsumRule =
    EinsumRule::new("select", "..v.., i -> ..i..").with_partial_rules(MOVED_BY);
/// Rule for booleans, which cannot be summed.
const SELECT_BOOL: EinsumRule =
    EinsumRule::new("select", "..V.., i -> ..i..").with_partial_rules(MOVED_BY);
const SELECT_ASSIGN: EinsumRule = EinsumRule::new("select_assign", "..v.., I, ..I.. -> ..v..");

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Returns the slices of `dim` at `indices`, as burn's [`select`](Tensor::select).
    ///
    /// A tensor sharded along `dim` is not moved: the result is a partial sum. Its product with an
    /// infinity may be [NaN](crate::dtensor::ops#infinities-and-ties).
    #[must_use]
    #[track_caller]
    pub fn select(self, dim: impl AsIndex, indices: DTensor<1, Int>) -> Self {
        let dim = dim_of("select", dim, D);
        let dtype = self.dtype();
        let rule = if dtype.is_bool() {
            &SELECT_BOOL
        } else {
            &SELECT
        };
        apply(
            &rule.at([dim]),
            (self, indices),
            |(x, indices), op| match lookup::part(op, 0, dim) {
                Some(range) => lookup::look_up(
                    x,
                    dim,
                    indices,
                    &range,
                    op,
                    |mask| {
                        let mut shape = [1; D];
                        shape[dim] = mask.dims()[0];
                        reshape(mask, shape.into())
                    },
                    |x, indices| x.select(dim, indices),
                ),
                None => lookup::of_type(x.select(dim, indices), dtype),
            },
        )
    }

    /// Updates the slices of `dim` at `indices` with `values`, as burn's
    /// [`select_assign`](Tensor::select_assign): assigns them, or combines them as `update`
    /// specifies.
    #[must_use]
    #[track_caller]
    pub fn select_assign(
        self,
        dim: impl AsIndex,
        indices: DTensor<1, Int>,
        values: Self,
        update: IndexingUpdateOp,
    ) -> Self {
        let dim = dim_of("select_assign", dim, D);
        let rule = Update {
            axes: SELECT_ASSIGN.at([dim]),
            update,
            dims: [dim, 0],
        };
        apply(
            &rule,
            (self, indices, values),
            |(x, indices, values), op| {
                let local =
                    |x: Tensor<D, K>, indices| x.select_assign(dim, indices, values, update);
                match lookup::part(op, 0, dim) {
                    Some(range) => lookup::update(x, dim, indices, &range, op, local),
                    None => local(x, indices),
                }
            },
        )
    }

    /// Returns the slices of `dim` at `indices` of any shape, as burn's [`take`](Tensor::take). The
    /// dimensions of `indices` replace `dim`.
    #[must_use]
    #[track_caller]
    pub fn take<const DI: usize, const DO: usize>(
        self,
        dim: impl AsIndex,
        indices: DTensor<DI, Int>,
    ) -> DTensor<DO, K> {
        let dim = dim_of("take", dim, D);
        let mut shape = self.dims().to_vec();
        shape.splice(dim..=dim, indices.dims());
        if shape.len() != DO {
            let why = format!(
                "the result {shape:?} has {} dimensions, but {DO} were requested",
                shape.len()
            );
            operand_error("take", &[self.shape(), indices.shape()], why).unwind();
        }
        let len = indices.shape().num_elements();
        self.select(dim, indices.reshape([len]))
            .reshape(Shape::from(shape))
    }
}
