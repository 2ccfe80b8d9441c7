//! Selection of whole slices by index, and updates of them.
//!
//! | | `x` | indices | values | output |
//! |---|---|---|---|---|
//! | another dimension | `S(d)` | `R` | `S(d)` | `S(d)` |
//! | select, indices cut | `R` | `S(0)` | | `S(dim)` |
//! | select, masked [lookup](super::lookup) | `S(dim)` | `R` | | `P(sum)` |
//! | select | `P(op)` | `R` | | `P(op)` |
//! | assign, own slices | `S(dim)` | `R` | `R` | `S(dim)` |
//! | assign, add | `P(sum)` | `S(0)` | `S(dim)` | `P(sum)` |
//! | assign, see [update](super::update) | `P(op)` | `R` | `P(op)` | `P(op)` |

use burn::tensor::{AsIndex, Bool, IndexingUpdateOp, Int, Shape, Tensor};

use super::args::{dim_of, misfit};
use super::empty::{blank, is_empty};
use super::placements::{R, S, SUM};
use super::rows::PARTIALS;
use super::{Rule, Strategy, binary, lookup, strategy, ternary, update};
use crate::Result;
use crate::dtensor::local::reshape;
use crate::dtensor::{DTensor, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Select {
    dim: usize,
    /// Whether elements can be added.
    sums: bool,
}

impl Rule for Select {
    fn name(&self) -> &'static str {
        "select"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let mut output = inputs[0].clone();
        output[self.dim] = inputs[1][0];
        Ok(vec![output])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let others = (0..inputs[0].num_dims()).filter(|&other| other != self.dim);
        let mut rows: Vec<_> = others.map(|other| strategy([S(other), R], [S(other)])).collect();
        rows.push(strategy([R, S(0)], [S(self.dim)]));
        if self.sums {
            rows.push(strategy([S(self.dim), R], [SUM]));
        }
        rows.extend(PARTIALS.iter().map(|&partial| strategy([partial, R], [partial])));
        rows
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SelectAssign {
    dim: usize,
    update: IndexingUpdateOp,
}

impl Rule for SelectAssign {
    fn name(&self) -> &'static str {
        "select_assign"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let mut values = inputs[0].clone();
        values[self.dim] = inputs[1][0];
        if values != inputs[2] {
            return Err(misfit(self.name(), inputs, format!("the values must have shape {values}")));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let others = (0..inputs[0].num_dims()).filter(|&other| other != self.dim);
        let mut rows: Vec<_> = others.map(|other| strategy([S(other), R, S(other)], [S(other)])).collect();
        rows.push(strategy([S(self.dim), R, R], [S(self.dim)]));
        if self.update == IndexingUpdateOp::Add {
            rows.push(strategy([SUM, S(0), S(self.dim)], [SUM]));
        }
        rows.extend(update::rows(self.update));
        rows
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The slices of `dim` at `indices`, as burn's [`select`](Tensor::select).
    ///
    /// A tensor sharded along `dim` is not moved: the result is a pending sum.
    #[must_use]
    pub fn select(self, dim: impl AsIndex, indices: DTensor<1, Int>) -> Self {
        let dim = dim_of("select", dim, D);
        let dtype = self.dtype();
        let rule = Select { dim, sums: !dtype.is_bool() };
        let along = |mask: Tensor<1, Bool>| {
            let mut shape = [1; D];
            shape[dim] = mask.dims()[0];
            reshape(mask, shape.into())
        };
        binary(&rule, self, indices, |x, indices, op| match lookup::part(op, 0, dim) {
            Some(range) => lookup::look_up(x, dim, indices, &range, op, along, |x, indices| x.select(dim, indices)),
            None => lookup::of_type(x.select(dim, indices), dtype),
        })
    }

    /// `values` put at, or combined with, the slices of `dim` at `indices`, as burn's
    /// [`select_assign`](Tensor::select_assign).
    #[must_use]
    pub fn select_assign(
        self,
        dim: impl AsIndex,
        indices: DTensor<1, Int>,
        values: Self,
        update: IndexingUpdateOp,
    ) -> Self {
        let dim = dim_of("select_assign", dim, D);
        ternary(&SelectAssign { dim, update }, self, indices, values, |x, indices, values, op| {
            if is_empty(op, 0) {
                return blank([x, values], op.output_shape(0));
            }
            let local = |x: Tensor<D, K>, indices| x.select_assign(dim, indices, values, update);
            match lookup::part(op, 0, dim) {
                Some(range) => lookup::update(x, dim, indices, &range, op, local),
                None => local(x, indices),
            }
        })
    }

    /// The slices of `dim` at `indices` of any shape, whose dimensions take the place of `dim`, as
    /// burn's [`take`](Tensor::take).
    #[must_use]
    pub fn take<const DI: usize, const DO: usize>(
        self,
        dim: impl AsIndex,
        indices: DTensor<DI, Int>,
    ) -> DTensor<DO, K> {
        let dim = dim_of("take", dim, D);
        let mut shape = self.dims().to_vec();
        shape.splice(dim..=dim, indices.dims());
        if shape.len() != DO {
            let why = format!("the result {shape:?} has {} dimensions, {DO} are asked for", shape.len());
            misfit("take", &[self.shape(), indices.shape()], why).unwind();
        }
        let len = indices.shape().num_elements();
        self.select(dim, indices.reshape([len])).reshape(Shape::from(shape))
    }
}
