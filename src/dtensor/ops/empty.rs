//! Products of parts without elements.
//!
//! A rank past the end of a short dimension holds an empty part. burn-flex 0.22 aborts on some
//! products of such; and what an empty part contributes must still reach the graph, because the
//! collectives of backward need every rank.

use burn::tensor::{Shape, Tensor, kind, module};

use crate::dtensor::Kind;
use crate::dtensor::local::{reshape, zeros};

/// `a @ b`, of tensors that may be empty.
pub(super) fn matmul<const D: usize, K: Kind + kind::Numeric>(a: Tensor<D, K>, b: Tensor<D, K>) -> Tensor<D, K> {
    if a.shape().num_elements() > 0 && b.shape().num_elements() > 0 {
        return a.matmul(b);
    }
    // Either nothing comes out, or sums over nothing.
    (a.sum_dim(D - 1) + b.sum_dim(D - 2)).mul_scalar(0)
}

/// `x @ weight + bias`, of tensors that may be empty.
pub(super) fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    if x.shape().num_elements() > 0 && weight.shape().num_elements() > 0 {
        return module::linear(x, weight, bias);
    }
    let mut row = [1; D];
    row[D - 1] = weight.dims()[1];
    let row = Shape::from(row);
    let product = (x.sum_dim(D - 1) + reshape(weight.sum_dim(0), row.clone())).mul_scalar(0);
    match bias {
        Some(bias) => product + reshape(bias, row),
        None => product,
    }
}

/// Zero, as the contribution of `x` to what it has no part in.
pub(super) fn nothing<const D: usize, K: Kind + kind::Numeric>(x: Tensor<D, K>) -> Tensor<1, K> {
    x.sum().mul_scalar(0)
}

/// The one element of `x` all over a tensor of this shape.
pub(super) fn spread<const D: usize, K: Kind + kind::Numeric>(x: Tensor<1, K>, shape: Shape) -> Tensor<D, K> {
    let zeros = zeros(shape, &x.clone().unsqueeze());
    zeros + x.unsqueeze()
}
