//! Triangles of matrices: rows and columns may both be sharded, since the diagonal of a part
//! is that of the whole, moved by where the part begins.
//!
//! | input | output |
//! |---|---|
//! | `S(d)` | `S(d)` |
//! | `P(op)` | `P(op)` |

use burn::tensor::{Shape, Tensor, kind};

use super::args::misfit;
use super::empty::is_empty;
use super::rows::{PARTIALS, kept, through};
use super::{Rule, Strategy, unary};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Triangle {
    name: &'static str,
}

impl Rule for Triangle {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        if inputs[0].num_dims() < 2 {
            return Err(misfit(self.name, inputs, "a matrix has two dimensions; give it another one"));
        }
        Ok(inputs.to_vec())
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        kept(1, 0..inputs[0].num_dims()).chain(through(1, PARTIALS)).collect()
    }
}

fn triangle<const D: usize, K: Kind>(
    name: &'static str,
    x: DTensor<D, K>,
    diagonal: i64,
    local: impl FnOnce(Tensor<D, K>, i64) -> Tensor<D, K>,
) -> DTensor<D, K> {
    unary(&Triangle { name }, x, |x, op| {
        let (rows, columns) = (op.input_range(0, D - 2), op.input_range(0, D - 1));
        let diagonal = diagonal + rows.start as i64 - columns.start as i64;
        if is_empty(op, 0) { x } else { local(x, diagonal) }
    })
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// The upper triangles of matrices, zeros below, as burn's [`triu`](Tensor::triu).
    #[must_use]
    pub fn triu(self, diagonal: i64) -> Self {
        triangle("triu", self, diagonal, |x, diagonal| x.triu(diagonal))
    }

    /// The lower triangles of matrices, zeros above, as burn's [`tril`](Tensor::tril).
    #[must_use]
    pub fn tril(self, diagonal: i64) -> Self {
        triangle("tril", self, diagonal, |x, diagonal| x.tril(diagonal))
    }
}
