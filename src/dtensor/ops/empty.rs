//! Tensors without elements.
//!
//! burn-flex 0.22 aborts on some operators of such, and burn answers others from the shapes alone,
//! outside the autodiff graph, though a gradient is asked of them. These go by themselves. That one
//! rank's part alone is empty does not happen here: see
//! [`takes_empty_parts`](super::Rule::takes_empty_parts).

use burn::tensor::{Shape, Tensor, kind};

use super::Resolved;
use crate::dtensor::Kind;
use crate::dtensor::local::{as_float, zeros};

/// Whether this rank's part of output `at` has no elements.
pub(super) fn is_empty(op: &Resolved, at: usize) -> bool {
    op.output_shape(at).num_elements() == 0
}

/// What has no element of `inputs` and is in their graph: zeros, where they or the result are empty.
pub(super) fn blank<const D: usize, const O: usize, K: Kind>(
    inputs: impl IntoIterator<Item = Tensor<D, K>>,
    shape: &Shape,
) -> Tensor<O, K> {
    let mut inputs = inputs.into_iter();
    let first = inputs.next().expect("an operator has an input");
    if !first.dtype().is_float() {
        return Tensor::zeros(shape.clone(), (&first.device(), first.dtype()));
    }
    let zero = inputs.fold(nothing(as_float(first)), |zero, input| zero + nothing(as_float(input)));
    Tensor::from_dispatch(zero.expand::<O, _>(shape.clone()).into_dispatch())
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
