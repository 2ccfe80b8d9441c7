//! Local tensor work that a change of layout needs.

use std::ops::Range;

use burn::backend::DispatchTensor;
use burn::tensor::{GradientCheckpointingStrategy, Shape, Slice, Tensor};

use super::Kind;

/// The part of `tensor` inside `ranges`, in memory of its own.
///
/// A view would keep the whole buffer alive.
pub(super) fn cut<const D: usize, K: Kind>(tensor: Tensor<D, K>, ranges: &[Range<usize>]) -> Tensor<D, K> {
    let whole = tensor.dims().iter().zip(ranges).all(|(&len, range)| *range == (0..len));
    if whole {
        return tensor;
    }
    let slices: Vec<Slice> = ranges.iter().cloned().map(Slice::from).collect();
    Tensor::from_dispatch(own(tensor.slice(slices.as_slice()).into_dispatch()))
}

/// [`cut`] along one dimension.
pub(super) fn cut_dim<const D: usize, K: Kind>(tensor: Tensor<D, K>, dim: usize, range: Range<usize>) -> Tensor<D, K> {
    let mut ranges: Vec<_> = tensor.dims().iter().map(|&len| 0..len).collect();
    ranges[dim] = range;
    cut(tensor, &ranges)
}

/// `tensor` at `range` of `dim` in a tensor of zeros whose `dim` has length `len`.
pub(super) fn pad_dim<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    dim: usize,
    range: Range<usize>,
    len: usize,
) -> Tensor<D, K> {
    let mut dims = tensor.dims();
    dims[dim] = len;
    let zeros = zeros(Shape::from(dims), &tensor);
    if range.is_empty() {
        return zeros;
    }
    let mut ranges: Vec<_> = dims.iter().map(|&len| 0..len).collect();
    ranges[dim] = range;
    let slices: Vec<Slice> = ranges.into_iter().map(Slice::from).collect();
    zeros.slice_assign(slices.as_slice(), tensor)
}

/// Zeros of the kind, dtype and device of `like`.
pub(super) fn zeros<const D: usize, K: Kind>(shape: Shape, like: &Tensor<D, K>) -> Tensor<D, K> {
    Tensor::zeros(shape, (&like.device(), like.dtype()))
}

/// Copies a view into a buffer of its own size; a tensor that fills its buffer stays as it is.
///
/// Only Flex slices without copying.
#[cfg(feature = "flex")]
pub(crate) fn own(tensor: DispatchTensor) -> DispatchTensor {
    use burn::backend::{BackendTensor, BackendTypes, DispatchKindConversion, Flex};

    type FlexTensor = <Flex as BackendTypes>::FloatTensorPrimitive;
    fn owned(view: FlexTensor) -> FlexTensor {
        let bytes = view.layout().num_elements() * view.dtype().size();
        if view.is_contiguous() && view.bytes().len() == bytes {
            return view;
        }
        FlexTensor::from_data(view.into_data())
    }

    let Ok(kind) = <DispatchTensor as DispatchKindConversion<Flex>>::try_into_backend(tensor.clone()) else {
        return tensor;
    };
    drop(tensor);
    <DispatchTensor as DispatchKindConversion<Flex>>::from_backend(match kind {
        BackendTensor::Float(view) => BackendTensor::Float(owned(view)),
        BackendTensor::Int(view) => BackendTensor::Int(owned(view)),
        BackendTensor::Bool(view) => BackendTensor::Bool(owned(view)),
        other => other,
    })
}

#[cfg(not(feature = "flex"))]
pub(crate) fn own(tensor: DispatchTensor) -> DispatchTensor {
    tensor
}

/// Whether the autodiff graph would record an operation on `tensor`.
pub(super) fn is_tracked<const D: usize, K: Kind>(tensor: &Tensor<D, K>) -> bool {
    tensor.dtype().is_float() && tensor.is_autodiff() && as_float(tensor.clone()).is_tracked()
}

/// Whether `tensor` keeps a gradient.
pub(super) fn is_require_grad<const D: usize, K: Kind>(tensor: &Tensor<D, K>) -> bool {
    tensor.dtype().is_float() && tensor.is_autodiff() && as_float(tensor.clone()).is_require_grad()
}

/// A tensor of kind `K`, known to be [`Float`](burn::tensor::Float), as such.
pub(super) fn as_float<const D: usize, K: Kind>(tensor: Tensor<D, K>) -> Tensor<D> {
    Tensor::from_dispatch(tensor.into_dispatch())
}

/// `plain` with the autodiff association of a tensor that has `strategy`, untracked.
pub(super) fn associate<const D: usize, K: Kind>(
    plain: Tensor<D, K>,
    strategy: Option<GradientCheckpointingStrategy>,
) -> Tensor<D, K> {
    match strategy {
        Some(strategy) => plain.autodiff().with_gradient_checkpointing_strategy(strategy),
        None => plain,
    }
}
