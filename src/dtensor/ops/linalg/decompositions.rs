//! Decompositions of whole matrices, each by itself.

use burn::linalg as local;

use super::super::args::misfit;
use super::super::{Axes, apply};
use super::matrix;
use crate::dtensor::DTensor;
use crate::dtensor::local::is_tracked;

const LU: Axes = Axes::new("lu", "..MN -> ..MM, ..MK, ..KN");
const QR: Axes = Axes::new("qr", "..MN -> ..MK, ..KN");
const SVD: Axes = Axes::new("svd", "..MN -> ..MK, ..K, ..KN");
const DET: Axes = Axes::new("det", "..MM -> ..");

/// `(P, L, U)` with `P @ L @ U` the matrices, as burn's [`lu`](local::lu): `[.., m, n]` to `[.., m, m]`,
/// `[.., m, k]` and `[.., k, n]`, with `k = min(m, n)`. `D1` is `D - 1`.
#[must_use]
#[track_caller]
pub fn lu<const D: usize, const D1: usize>(tensor: DTensor<D>) -> (DTensor<D>, DTensor<D>, DTensor<D>) {
    let [rows, columns] = matrix("lu", &tensor, D1 + 1);
    apply(&LU.lens([rows.min(columns)]), tensor, |x, _| local::lu::<D, D1>(x))
}

/// `(Q, R)` with `Q @ R` the matrices, as burn's [`qr`](local::qr): `[.., m, n]` to `[.., m, k]` and
/// `[.., k, n]`, with `k = min(m, n)` if `reduced`, else `m`.
#[must_use]
#[track_caller]
pub fn qr<const D: usize>(tensor: DTensor<D>, reduced: bool) -> (DTensor<D>, DTensor<D>) {
    let [rows, columns] = matrix("qr", &tensor, D);
    let inner = if reduced { rows.min(columns) } else { rows };
    apply(&QR.lens([inner]), tensor, |x, _| local::qr(x, reduced))
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
        let why = format!("it takes at least 1 sweep, not {sweeps}, and has no gradient; `detach` the matrices");
        misfit("svd", &[tensor.shape()], why).unwind();
    }
    apply(&SVD.lens([rows.min(columns)]), tensor, |x, _| local::svd::<D, D1>(x, sweeps))
}

/// The determinants of batches of square matrices, as burn's [`det`](local::det): `[.., m, m]` to `[..]`. `D1`
/// is `D - 1` and `D2` is `D - 2`.
#[must_use]
#[track_caller]
pub fn det<const D: usize, const D1: usize, const D2: usize>(tensor: DTensor<D>) -> DTensor<D2> {
    let [rows, columns] = matrix("det", &tensor, D1 + 1);
    if D2 + 2 != D || D2 == 0 || rows != columns || rows == 0 {
        let why = format!("it is of batches of square matrices, and has 2 dimensions less, not {D2}");
        misfit("det", &[tensor.shape()], why).unwind();
    }
    apply(&DET, tensor, |x, _| local::det::<D, D1, D2>(x))
}
