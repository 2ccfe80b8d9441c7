//! Matrix products.

use burn::tensor::kind;

use super::{EinsumRule, apply, product};
use crate::dtensor::{DTensor, Kind};

/// Rule with the strategies `S(0), R -> S(0)` (m), `S(1), S(0) -> P(sum)` (k) and `R, S(1) -> S(1)`
/// (n) for matrices. A partial sum of either factor passes through, and batches broadcast.
const MATMUL: EinsumRule = EinsumRule::new("matmul", "..?mk, ..?kn -> ..mn").linear(&[0, 1]);

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// Returns the matrix product over the last two dimensions, as burn's
    /// [`matmul`](burn::tensor::Tensor::matmul): `[.., m, k] @ [.., k, n] -> [.., m, n]`.
    ///
    /// A partial sum is multiplied before it is reduced, so its product with an infinity may be
    /// [NaN](crate::dtensor::ops#infinities-and-ties).
    #[must_use]
    #[track_caller]
    pub fn matmul(self, other: Self) -> Self {
        apply(&MATMUL, (self, other), |(a, b), op| {
            product::matmul(a, b, op)
        })
    }
}
