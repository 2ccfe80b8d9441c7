//! Local tensor work that a change of layout needs.

use std::any::Any;
use std::ops::Range;

use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
#[cfg(feature = "flex")]
use burn::backend::{BackendTensor, BackendTypes, DispatchKindConversion, Flex};
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{DType, GradientCheckpointingStrategy, Shape, Slice, Tensor};

use super::Kind;
use crate::memory::assigned;
#[cfg(feature = "flex")]
use crate::memory::flex as memory;

/// The part of `tensor` inside `ranges`, in memory of its own: a view would keep the whole buffer
/// alive. A part that is the whole stays as it is.
pub(super) fn slice<const D: usize, K: Kind>(tensor: Tensor<D, K>, ranges: &[Range<usize>]) -> Tensor<D, K> {
    let full = tensor.dims().iter().zip(ranges).all(|(&len, range)| *range == (0..len));
    if full {
        return tensor;
    }
    let slices: Vec<Slice> = ranges.iter().cloned().map(Slice::from).collect();
    Tensor::from_dispatch(own(tensor.slice(slices.as_slice()).into_dispatch()))
}

/// [`slice`] along one dimension.
pub(super) fn slice_dim<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    dim: usize,
    range: Range<usize>,
) -> Tensor<D, K> {
    let mut ranges: Vec<_> = tensor.dims().iter().map(|&len| 0..len).collect();
    ranges[dim] = range;
    slice(tensor, &ranges)
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

/// `tensor` with this shape, of as many elements. A length of 0 is one: burn's own reshape reads it
/// as "keep this dimension".
pub(super) fn reshape<const D: usize, const O: usize, K: Kind>(tensor: Tensor<D, K>, shape: Shape) -> Tensor<O, K> {
    let dtype = tensor.dtype();
    let tensor = tensor.into_dispatch();
    Tensor::from_dispatch(if dtype.is_float() {
        Dispatch::float_reshape(tensor, shape)
    } else if dtype.is_bool() {
        Dispatch::bool_reshape(tensor, shape)
    } else {
        Dispatch::int_reshape(tensor, shape)
    })
}

/// `tensor`, of floats if it has another one, in this element type.
pub(super) fn cast<const D: usize, K: Kind>(tensor: Tensor<D, K>, dtype: DType) -> Tensor<D, K> {
    if tensor.dtype() == dtype {
        return tensor;
    }
    Tensor::from_dispatch(as_float(tensor).cast(dtype).into_dispatch())
}

/// `tensor` in a type that holds sums over ranks: half precision is made single.
pub(super) fn in_single<const D: usize, K: Kind>(tensor: Tensor<D, K>) -> Tensor<D, K> {
    let dtype = tensor.dtype();
    if dtype.is_float() && dtype.size() < 4 { cast(tensor, DType::F32) } else { tensor }
}

/// Zeros of the kind, dtype and device of `like`.
pub(super) fn zeros<const D: usize, K: Kind>(shape: Shape, like: &Tensor<D, K>) -> Tensor<D, K> {
    Tensor::zeros(shape, (&like.device(), like.dtype()))
}

/// The values of a plain view in a buffer of their own size. A Flex tensor that fills its buffer
/// stays as it is.
pub(crate) fn own(view: DispatchTensor) -> DispatchTensor {
    #[cfg(feature = "flex")]
    if let Ok(kind) = <DispatchTensor as DispatchKindConversion<Flex>>::try_into_backend(view.clone()) {
        drop(view);
        return <DispatchTensor as DispatchKindConversion<Flex>>::from_backend(match kind {
            BackendTensor::Float(view) => BackendTensor::Float(own_flex(view)),
            BackendTensor::Int(view) => BackendTensor::Int(own_flex(view)),
            BackendTensor::Bool(view) => BackendTensor::Bool(own_flex(view)),
            other => other,
        });
    }
    assigned(view)
}

#[cfg(feature = "flex")]
type FlexTensor = <Flex as BackendTypes>::FloatTensorPrimitive;

#[cfg(feature = "flex")]
fn own_flex(view: FlexTensor) -> FlexTensor {
    let bytes = view.layout().num_elements() * view.dtype().size();
    if memory::is_lasting(&view) && view.is_contiguous() && view.bytes().len() == bytes {
        return view;
    }
    memory::copied(&view)
}

/// Whether the autodiff graph would record an operation on `tensor`.
pub(crate) fn is_tracked<const D: usize, K: Kind>(tensor: &Tensor<D, K>) -> bool {
    float_ref(tensor).is_some_and(Tensor::is_tracked)
}

/// Whether `tensor` keeps a gradient.
pub(super) fn is_require_grad<const D: usize, K: Kind>(tensor: &Tensor<D, K>) -> bool {
    float_ref(tensor).is_some_and(|float| float.is_autodiff() && float.is_require_grad())
}

/// A float tensor as such, if `K` is [`Float`](burn::tensor::Float): known when this is compiled.
fn float_ref<const D: usize, K: Kind>(tensor: &Tensor<D, K>) -> Option<&Tensor<D>> {
    (tensor as &dyn Any).downcast_ref()
}

/// A tensor of kind `K`, known to be [`Float`](burn::tensor::Float), as such.
pub(crate) fn as_float<const D: usize, K: Kind>(tensor: Tensor<D, K>) -> Tensor<D> {
    Tensor::from_dispatch(tensor.into_dispatch())
}

/// `plain` with the autodiff association of a tensor that has `strategy`, untracked.
pub(crate) fn associate<const D: usize, K: Kind>(
    plain: Tensor<D, K>,
    strategy: Option<GradientCheckpointingStrategy>,
) -> Tensor<D, K> {
    match strategy {
        Some(strategy) => plain.autodiff().with_gradient_checkpointing_strategy(strategy),
        None => plain,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Bool, Device, Float, Int, Tensor};

    use super::*;

    /// Of the only handle, too: burn would hand on the buffer itself.
    #[cfg(feature = "flex")]
    #[test]
    fn what_is_owned_is_in_lasting_memory() {
        for view in [memory::tests::foreign(2), memory::tests::foreign(2).narrow(0, 1, 1)] {
            let shape = view.layout().shape().clone();
            let owned = own_flex(view);
            assert!(memory::is_lasting(&owned));
            assert_eq!(*owned.layout().shape(), shape);
        }
        let own = memory::copied(&memory::tests::foreign(2));
        let address = own.bytes().as_ptr();
        assert_eq!(own_flex(own).bytes().as_ptr(), address, "what is its own already stays");
    }

    /// The generic copy, on the backend at hand.
    #[test]
    fn every_kind_of_view_gets_memory_of_its_own() {
        fn check<K: Kind>(view: Tensor<2, K>) {
            let copy: Tensor<2, K> = Tensor::from_dispatch(assigned(view.clone().into_dispatch()));
            assert_eq!(copy.dtype(), view.dtype());
            assert_eq!(copy.to_data(), view.into_data());
        }
        let device = Device::flex();
        let ints = Tensor::<1, Int>::arange(0..12, &device).reshape([3, 4]);
        for rows in [1..3, 1..1] {
            let view = ints.clone().slice_dim(0, rows);
            check::<Int>(view.clone());
            check::<Float>(view.clone().float());
            check::<Bool>(view.greater_elem(5));
        }
    }
}
