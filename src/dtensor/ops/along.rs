//! Operators that need a dimension whole on every rank, and whatever else may be cut.
//!
//! | input | outputs |
//! |---|---|
//! | `S(d)`, `d` any other dimension | `S(d)` |
//! | those of the operator's [`Table`] | its last column |

use std::iter::repeat_n;

use burn::tensor::{Int, Shape, Tensor};

use super::placements::S;
use super::pointwise::Table;
use super::{Rule, Strategy, resolve, strategy, unary};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

/// The rule of an operator along one dimension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Along {
    name: &'static str,
    table: Table,
    dim: usize,
    len: Option<usize>,
    outputs: usize,
}

impl Along {
    /// The operator `name` along `dim`, with one output of the input's shape. Its way through
    /// pending reductions is `table`.
    pub(super) const fn new(name: &'static str, table: Table, dim: usize) -> Self {
        Self { name, table, dim, len: None, outputs: 1 }
    }

    /// The outputs have length `len` along the dimension.
    pub(super) const fn with_len(self, len: usize) -> Self {
        Self { len: Some(len), ..self }
    }

    /// There are `outputs` of them, of the same shape.
    pub(super) const fn with_outputs(self, outputs: usize) -> Self {
        Self { outputs, ..self }
    }
}

impl Rule for Along {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let mut output = inputs[0].clone();
        output[self.dim] = self.len.unwrap_or(output[self.dim]);
        Ok(vec![output; self.outputs])
    }

    fn strategies(&self, inputs: &[Shape], _outputs: &[Shape]) -> Vec<Strategy> {
        let others = (0..inputs[0].num_dims()).filter(|&dim| dim != self.dim);
        let cut = others.map(|dim| strategy([S(dim)], repeat_n(S(dim), self.outputs)));
        cut.chain(self.table.rows(self.outputs)).collect()
    }
}

/// Runs the operator.
pub(super) fn along<const D: usize, K: Kind>(
    rule: &Along,
    x: DTensor<D, K>,
    local: impl FnOnce(Tensor<D, K>) -> Tensor<D, K>,
) -> DTensor<D, K> {
    unary(rule, x, |x, _| local(x))
}

/// Runs an operator that also says where it found its values.
pub(super) fn along_with_indices<const D: usize, K: Kind>(
    rule: &Along,
    x: DTensor<D, K>,
    local: impl FnOnce(Tensor<D, K>) -> (Tensor<D, K>, Tensor<D, Int>),
) -> (DTensor<D, K>, DTensor<D, Int>) {
    let rule = rule.clone().with_outputs(2);
    let op = resolve(&rule, &[&x.spec]).unwrap_or_else(|error| error.unwind());
    let (values, indices) = local(x.enter(&op, 0));
    (op.leave(0, values), op.leave(1, indices))
}
