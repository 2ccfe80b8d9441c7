//! Decompositions of whole matrices, each by itself.

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

/// `(P, L, U)` with `P @ L @ U` the matrices, as burn's [`lu`](local::lu): `[.., m, n]` to `[.., m, m]`,
/// `[.., m, k]` and `[.., k, n]`, with `k = min(m, n)`. `D1` is `D - 1`.
#[must_use]
#[track_caller]
pub fn lu<const D: usize, const D1: usize>(tensor: DTensor<D>) -> (DTensor<D>, DTensor<D>, DTensor<D>) {
    let [rows, columns] = matrix("lu", &tensor, D1 + 1);
    apply(&LU.lens([rows.min(columns)]), tensor, |x, op| {
        let (p, l, u) = local::lu::<4, 3>(alone(x));
        (part(p, op, 0), part(l, op, 1), part(u, op, 2))
    })
}

/// `(Q, R)` with `Q @ R` the matrices, as burn's [`qr`](local::qr): `[.., m, n]` to `[.., m, k]` and
/// `[.., k, n]`, with `k = min(m, n)` if `reduced`, else `m`.
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

/// `(U, S, Vᵀ)` with `U @ diag(S) @ Vᵀ` the matrices, as burn's [`svd`](local::svd): `[.., m, n]` to
/// `[.., m, k]`, `[.., k]` and `[.., k, n]`, with `k = min(m, n)`. `D1` is `D - 1`.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) also for matrices with
/// gradients, which burn's has none of.
#[must_use]
#[track_caller]
pub fn svd<const D: usize, const D1: usize>(
    tensor: DTensor<D>,
    sweeps: usize,
) -> (DTensor<D>, DTensor<D1>, DTensor<D>) {
    let [rows, columns] = matrix("svd", &tensor, D1 + 1);
    if sweeps == 0 || is_tracked(&tensor.local) {
        let why =
            format!("it takes at least 1 sweep, not {sweeps}, and matrices that need no gradient, for it has none");
        operand_error("svd", &[tensor.shape()], why).unwind();
    }
    apply(&SVD.lens([rows.min(columns)]), tensor, |x, _| {
        // Burn has it of tensors on a plain device alone.
        let strategy = x.gradient_checkpointing_strategy();
        let (u, s, vt) = local::svd::<D, D1>(x.without_autodiff(), sweeps);
        (associate(u, strategy), associate(s, strategy), associate(vt, strategy))
    })
}

/// The determinants of batches of square matrices, as burn's [`det`](local::det): `[.., m, m]` to `[..]`. `D1`
/// is `D - 1` and `D2` is `D - 2`.
#[must_use]
#[track_caller]
pub fn det<const D: usize, const D1: usize, const D2: usize>(tensor: DTensor<D>) -> DTensor<D2> {
    let [rows, columns] = matrix("det", &tensor, D1 + 1);
    if D2 + 2 != D || D2 == 0 || rows != columns || rows == 0 {
        let why = format!("it is of batches of square matrices, and has 2 dimensions less, not {D2}");
        operand_error("det", &[tensor.shape()], why).unwind();
    }
    apply(&DET, tensor, |x, op| part(local::det::<4, 3, 2>(alone(x)), op, 0))
}

/// `[.., m, n]` as `[matrices, 1, m, n]`. They are made of products, and burn's look at how many matrices come
/// together, of which ranks have as many as they have: they would record other nodes of the graph.
fn alone<const D: usize>(x: Tensor<D>) -> Tensor<4> {
    let [rows, columns] = [x.dims()[D - 2], x.dims()[D - 1]];
    let matrices = x.dims()[..D - 2].iter().product();
    reshape(x, [matrices, 1, rows, columns].into())
}

/// This rank's part of output `at`, of what each matrix made.
fn part<const D: usize, const O: usize>(made: Tensor<D>, op: &Operator, at: usize) -> Tensor<O> {
    reshape(made, op.output_shape(at).clone())
}
