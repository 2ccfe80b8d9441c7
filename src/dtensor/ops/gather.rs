//! Gather and scatter: one index an element.
//!
//! | | `x` | indices | values | output |
//! |---|---|---|---|---|
//! | another dimension | `S(d)` | `S(d)` | `S(d)` | `S(d)` |
//! | gather, indices cut | `R` | `S(dim)` | | `S(dim)` |
//! | gather, masked [lookup](super::lookup) | `S(dim)` | `R` | | `P(sum)` |
//! | gather | `P(op)` | `R` | | `P(op)` |
//! | scatter, own rows | `S(dim)` | `R` | `R` | `S(dim)` |
//! | scatter, add | `P(sum)` | `S(dim)` | `S(dim)` | `P(sum)` |
//! | scatter, see [update](super::update) | `P(op)` | `R` | `P(op)` | `P(op)` |

use burn::tensor::{AsIndex, IndexingUpdateOp, Int, Shape};

use super::args::{dim_of, misfit};
use super::empty::{blank, is_empty};
use super::placements::{R, S, SUM};
use super::rows::{PARTIALS, kept};
use super::{Rule, Strategy, binary, lookup, strategy, ternary, update};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Gather {
    dim: usize,
    /// Whether elements can be added.
    sums: bool,
}

impl Rule for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        check_others(self.name(), self.dim, inputs)?;
        Ok(vec![inputs[1].clone()])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let mut rows: Vec<_> = kept(2, others(self.dim, inputs)).collect();
        rows.push(strategy([R, S(self.dim)], [S(self.dim)]));
        if self.sums {
            rows.push(strategy([S(self.dim), R], [SUM]));
        }
        rows.extend(PARTIALS.iter().map(|&partial| strategy([partial, R], [partial])));
        rows
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Scatter {
    dim: usize,
    update: IndexingUpdateOp,
}

impl Rule for Scatter {
    fn name(&self) -> &'static str {
        "scatter"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        check_others(self.name(), self.dim, &inputs[..2])?;
        if inputs[1] != inputs[2] {
            return Err(misfit(self.name(), inputs, "there must be one value an index"));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let mut rows: Vec<_> = kept(3, others(self.dim, inputs)).collect();
        rows.push(strategy([S(self.dim), R, R], [S(self.dim)]));
        if self.update == IndexingUpdateOp::Add {
            rows.push(strategy([SUM, S(self.dim), S(self.dim)], [SUM]));
        }
        rows.extend(update::rows(self.update));
        rows
    }
}

fn others(dim: usize, inputs: &[Shape]) -> impl Iterator<Item = usize> {
    (0..inputs[0].num_dims()).filter(move |&other| other != dim)
}

fn check_others(name: &'static str, dim: usize, inputs: &[Shape]) -> Result<()> {
    if others(dim, inputs).all(|other| inputs[0][other] == inputs[1][other]) {
        return Ok(());
    }
    Err(misfit(name, inputs, format!("tensor and indices must have the same lengths but along dimension {dim}")))
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The elements at `indices` along `dim`, as burn's [`gather`](burn::tensor::Tensor::gather).
    ///
    /// A tensor sharded along `dim` is not moved: the result is a pending sum.
    #[must_use]
    pub fn gather(self, dim: impl AsIndex, indices: DTensor<D, Int>) -> Self {
        let dim = dim_of("gather", dim, D);
        let dtype = self.dtype();
        let rule = Gather { dim, sums: !dtype.is_bool() };
        binary(&rule, self, indices, |x, indices, op| match lookup::part(op, 0, dim) {
            Some(range) => {
                lookup::look_up(x, dim, indices, &range, op, |mask| mask, |x, indices| x.gather(dim, indices))
            }
            None => lookup::of_type(x.gather(dim, indices), dtype),
        })
    }

    /// `values` put at, or combined with, the elements at `indices` along `dim`, as burn's
    /// [`scatter`](burn::tensor::Tensor::scatter).
    #[must_use]
    pub fn scatter(self, dim: impl AsIndex, indices: DTensor<D, Int>, values: Self, update: IndexingUpdateOp) -> Self {
        let dim = dim_of("scatter", dim, D);
        ternary(&Scatter { dim, update }, self, indices, values, |x, indices, values, op| {
            if is_empty(op, 0) {
                return blank([x, values], op.output_shape(0));
            }
            let local = |x: burn::tensor::Tensor<D, K>, indices| x.scatter(dim, indices, values, update);
            match lookup::part(op, 0, dim) {
                Some(range) => lookup::update(x, dim, indices, &range, op, local),
                None => local(x, indices),
            }
        })
    }
}
