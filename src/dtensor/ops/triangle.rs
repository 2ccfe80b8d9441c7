//! Triangles of matrices. Rows and columns may both be sharded: the diagonal in a shard is the
//! global one, shifted by the start of the shard.

use burn::tensor::kind;

use super::partial_rules::MOVED;
use super::{EinsumRule, Operator, apply};
use crate::dtensor::{DTensor, Kind};

const fn triangle(name: &'static str) -> EinsumRule {
    EinsumRule::new(name, "..rc -> ..rc").with_partial_rules(MOVED)
}

/// Converts the global index `diagonal` to the one in this rank's shard.
fn local<const D: usize>(diagonal: i64, op: &Operator) -> i64 {
    let rows = op.input_range(0, D - 2);
    let columns = op.input_range(0, D - 1);
    diagonal + rows.start as i64 - columns.start as i64
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// Keeps the upper triangles of matrices and sets the rest to zero, as burn's
    /// [`triu`](burn::tensor::Tensor::triu).
    #[must_use]
    #[track_caller]
    pub fn triu(self, diagonal: i64) -> Self {
        apply(&const { triangle("triu") }, self, |x, op| {
            x.triu(local::<D>(diagonal, op))
        })
    }

    /// Keeps the lower triangles of matrices and sets the rest to zero, as burn's
    /// [`tril`](burn::tensor::Tensor::tril).
    #[must_use]
    #[track_caller]
    pub fn tril(self, diagonal: i64) -> Self {
        apply(&const { triangle("tril") }, self, |x, op| {
            x.tril(local::<D>(diagonal, op))
        })
    }
}
