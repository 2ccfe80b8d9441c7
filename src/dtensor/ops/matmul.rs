//! Matrix products.

use burn::tensor::kind;

use super::{EinsumRule, apply, product};
use crate::dtensor::{DTensor, Kind};

/// Of matrices: `S(0), R -> S(0)` (m), `S(1), S(0) -> P(sum)` (k), `R, S(1) -> S(1)` (n), and a sum of either
/// factor stays one. Batches broadcast.
const MATMUL: EinsumRule = EinsumRule::new("matmul", "..?mk, ..?kn -> ..mn").linear(&[0, 1]);

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// The matrix product of the last two dimensions, as burn's
    /// [`matmul`](burn::tensor::Tensor::matmul): `[.., m, k] @ [.., k, n] -> [.., m, n]`.
    #[must_use]
    #[track_caller]
    pub fn matmul(self, other: Self) -> Self {
        apply(&MATMUL, (self, other), |(a, b), op| product::matmul(a, b, op))
    }
}
