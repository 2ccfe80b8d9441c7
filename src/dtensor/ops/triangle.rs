//! Triangles of matrices: rows and columns may both be sharded, since the diagonal of a part
//! is that of the whole, moved by where the part begins.

use burn::tensor::kind;

use super::partial_rules::MOVED;
use super::{EinsumRule, Operator, apply};
use crate::dtensor::{DTensor, Kind};

const fn triangle(name: &'static str) -> EinsumRule {
    EinsumRule::new(name, "..rc -> ..rc").with_partial_rules(MOVED)
}

/// `diagonal` of the whole, in this rank's part.
fn local<const D: usize>(diagonal: i64, op: &Operator) -> i64 {
    let (rows, columns) = (op.input_range(0, D - 2), op.input_range(0, D - 1));
    diagonal + rows.start as i64 - columns.start as i64
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// The upper triangles of matrices, zeros below, as burn's [`triu`](burn::tensor::Tensor::triu).
    #[must_use]
    #[track_caller]
    pub fn triu(self, diagonal: i64) -> Self {
        apply(&const { triangle("triu") }, self, |x, op| x.triu(local::<D>(diagonal, op)))
    }

    /// The lower triangles of matrices, zeros above, as burn's [`tril`](burn::tensor::Tensor::tril).
    #[must_use]
    #[track_caller]
    pub fn tril(self, diagonal: i64) -> Self {
        apply(&const { triangle("tril") }, self, |x, op| x.tril(local::<D>(diagonal, op)))
    }
}
