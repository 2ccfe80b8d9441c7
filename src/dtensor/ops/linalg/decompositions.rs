//! Decompositions of complete matrices. Each matrix is decomposed independently.

use burn::linalg as local;
use burn::tensor::Tensor;

use super::super::args::operand_error;
use super::super::{EinsumRule, Operator, apply};
use super::matrix;
use crate::dtensor::DTensor;
use crate::dtensor::local::{associate, is_tracked, reshape};

const LU: EinsumRule = EinsumRule::new("lu", "..MN -> ..MM, ..MK, ..KN");
const QR: EinsumRule = EinsumRule::new("qr", "..MN -> ..MK, ..KN");
const SVD: EinsumRule = EinsumRule::new("svd", "..MN -> ..MK, ..K, ..KN");
const DET: EinsumRule = EinsumRule::new("det", "..MM -> ..");

/// Decomposes the matrices into `P @ L @ U`, as burn's [`lu`](local::lu). Returns `(P, L, U)`:
/// `[.., m, n]` to `[.., m, m]`, `[.., m, k]` and `[.., k, n]`, with `k = min(m, n)`. `D1` is `D -
/// 1`.
#[must_use]
#[track_caller]
pub fn lu<const D: usize, const D1: usize>(
    tensor: DTensor<D>,
) -> (DTensor<D>, DTensor<D>, DTensor<D>) {
    let [rows, columns] = matrix("lu", &tensor, D1 + 1);
    apply(&LU.lens([rows.min(columns)]), tensor, |x, op| {
        let (p, l, u) = local::lu::<4, 3>(alone(x));
        (part(p, op, 0), part(l, op, 1), part(u, op, 2))
    })
}

/// Decomposes the matrices into `Q @ R`, as burn's [`qr`](local::qr). Returns `(Q, R)`: `[.., m,
/// n]` to `[.., m, k]` and `[.., k, n]`, with `k = min(m, n)` if `reduced`, or else `k = m`.
#[must_use]
#[track_caller]
pub fn qr<const D: usize>(tensor: DTensor<D>, reduced: bool) -> (DTensor<D>, DTensor<D>) {
    let [rows, columns] = matrix("qr", &tensor, D);
    let inner = if reduced { rows.min(columns) } else { rows };
    apply(&QR.lens([inner]), tensor, |x, op| {
        let (q, r) = local::qr(alone(x), reduced);
        (part(q, op, 0), part(r, op, 1))
    })
}

/// Decomposes the matrices into `U @ diag(S) @ Vᵀ`, as burn's [`svd`](local::svd). Returns `(U, S, Vᵀ)`: `[.., m,
/// n]` to `[.., m, k]`, `[.., k]` and `[.., k, n]`, with `k = min(m, n)`. `D1` is `D - 1`.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) also for tracked
/// matrices, because burn's function is not differentiable.
#[must_use]
#[track_caller]
pub fn svd<const D: usize, const D1: usize>(
    tensor: DTensor<D>,
    sweeps: usize,
) -> (DTensor<D>, DTensor<D1>, DTensor<D>) {
    let [rows, columns] = matrix("svd", &tensor, D1 + 1);
    if sweeps == 0 || is_tracked(&tensor.local) {
        let why = format!(
            "it takes at least 1 sweep, not {sweeps}, and matrices that need no gradient: it has none"
        );
        operand_error("svd", &[tensor.shape()], why).unwind();
    }
    apply(&SVD.lens([rows.min(columns)]), tensor, |x, _| {
        // Burn's function accepts tensors on a device without autodiff only.
        let strategy = x.gradient_checkpointing_strategy();
        let (u, s, vt) = local::svd::<D, D1>(x.without_autodiff(), sweeps);
        (
            associate(u, strategy),
            associate(s, strategy),
            associate(vt, strategy),
        )
    })
}

/// Returns the determinants of batches of square matrices, as burn's [`det`](local::det): `[.., m,
/// m]` to `[..]`. `D1` is `D - 1` and `D2` is `D - 2`.
#[must_use]
#[track_caller]
pub fn det<const D: usize, const D1: usize, const D2: usize>(tensor: DTensor<D>) -> DTensor<D2> {
    let [rows, columns] = matrix("det", &tensor, D1 + 1);
    if D2 + 2 != D || D2 == 0 || rows != columns || rows == 0 {
        let why = format!(
            "it takes batches of square matrices, and the result has 2 dimensions less, not {D2}"
        );
        operand_error("det", &[tensor.shape()], why).unwind();
    }
    apply(&DET, tensor, |x, op| {
        part(local::det::<4, 3, 2>(alone(x)), op, 0)
    })
}

/// Reshapes `[.., m, n]` to `[matrices, 1, m, n]`. The decompositions use matrix products, and burn
/// records different nodes depending on the number of matrices in a product, which differs between
/// ranks.
fn alone<const D: usize>(x: Tensor<D>) -> Tensor<4> {
    let [rows, columns] = [x.dims()[D - 2], x.dims()[D - 1]];
    let matrices = x.dims()[..D - 2].iter().product();
    reshape(x, [matrices, 1, rows, columns].into())
}

/// Reshapes the results of all matrices to this rank's local tensor of output `at`.
fn part<const D: usize, const O: usize>(made: Tensor<D>, op: &Operator, at: usize) -> Tensor<O> {
    reshape(made, op.output_shape(at).clone())
}
