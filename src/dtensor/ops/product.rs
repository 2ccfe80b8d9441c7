//! Local matrix products that record the same number of autodiff nodes on every rank.
//!
//! Burn's own products depend on the local lengths: one row, one matrix, or a batch that can be
//! folded record different nodes. If three rows are sharded over two ranks, one rank has a single
//! row and would get out of step with the other in backward. The products here depend on global
//! shapes only, or always do the same.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Tensor, kind};

use super::Operator;
use crate::dtensor::Kind;
use crate::dtensor::local::reshape;

/// Returns `a @ b` for the inputs of `op`: `[.., m, k] @ [.., k, n]`.
pub(super) fn matmul<const D: usize, K: Kind + kind::Numeric>(
    a: Tensor<D, K>,
    b: Tensor<D, K>,
    op: &Operator,
) -> Tensor<D, K> {
    if op.has_empty_part() {
        // The result is empty, or it is a sum of no products.
        return (a.sum_dim(D - 1) + b.sum_dim(D - 2)).mul_scalar(0);
    }
    // Burn folds a batch of vectors times one matrix into a single product. A length of 1 in the
    // global shape is also 1 on every rank.
    if D > 2 && op.input_spec(0).shape()[D - 2] == 1 && op.input_spec(1).shape()[D - 3] == 1 {
        return a.matmul(b);
    }
    Tensor::from_dispatch(matmul_of(a.into_dispatch(), b.into_dispatch()))
}

/// Returns `a @ b` as one node.
pub(super) fn matmul_of(a: DispatchTensor, b: DispatchTensor) -> DispatchTensor {
    if a.dtype().is_float() {
        Dispatch::float_matmul(a, b)
    } else {
        Dispatch::int_matmul(a, b)
    }
}

/// Returns `x @ weight + bias` for `[.., d_in]`, `[d_in, d_out]` and `[d_out]`, as one product of
/// all rows.
pub(super) fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let [d_in, d_out] = weight.dims();
    let mut shape = x.shape();
    shape[D - 1] = d_out;
    let rows = shape[..D - 1].iter().product();
    let x: Tensor<2> = fold(x, Shape::new([rows, d_in]));
    let product: Tensor<2> = if x.shape().num_elements() > 0 && d_out > 0 {
        Tensor::from_dispatch(matmul_of(x.into_dispatch(), weight.into_dispatch()))
    } else {
        (x.sum_dim(1) + weight.sum_dim(0)).mul_scalar(0)
    };
    let output = match bias {
        Some(bias) => product + reshape(bias, Shape::new([1, d_out])),
        None => product,
    };
    fold(output, shape)
}

/// Reshapes `x`. This records a node unless the number of dimensions stays the same.
fn fold<const D: usize, const O: usize>(x: Tensor<D>, shape: Shape) -> Tensor<O> {
    if D == O {
        Tensor::from_dispatch(x.into_dispatch())
    } else {
        reshape(x, shape)
    }
}
