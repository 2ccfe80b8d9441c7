//! Operations on local tensors that changes of layout need: slicing, padding, casting, and copies
//! of views.

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

/// Returns a copy of the region `ranges` of `tensor`. A view would keep the complete buffer alive.
/// If the region is all of `tensor`, it is returned unchanged.
pub(super) fn slice<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    ranges: &[Range<usize>],
) -> Tensor<D, K> {
    let full = tensor
        .dims()
        .iter()
        .zip(ranges)
        .all(|(&len, range)| *range == (0..len));
    if full {
        return tensor;
    }
    let slices: Vec<Slice> = ranges.iter().cloned().map(Slice::from).collect();
    Tensor::from_dispatch(own(tensor.slice(slices.as_slice()).into_dispatch()))
}

/// Like [`slice`], but along one dimension only.
pub(super) fn slice_dim<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    dim: usize,
    range: Range<usize>,
) -> Tensor<D, K> {
    let mut ranges: Vec<_> = tensor.dims().iter().map(|&len| 0..len).collect();
    ranges[dim] = range;
    slice(tensor, &ranges)
}

/// Returns zeros whose dimension `dim` has length `len`, with `tensor` written at `range` of that
/// dimension.
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

/// Reshapes `tensor` to a shape with the same number of elements. A length of 0 means 0; burn's own
/// reshape would interpret it as "keep this dimension".
pub(super) fn reshape<const D: usize, const O: usize, K: Kind>(
    tensor: Tensor<D, K>,
    shape: Shape,
) -> Tensor<O, K> {
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

/// Casts `tensor` to `dtype` if it has another element type. It must be a float tensor in that
/// case.
pub(crate) fn cast<const D: usize, K: Kind>(tensor: Tensor<D, K>, dtype: DType) -> Tensor<D, K> {
    if tensor.dtype() == dtype {
        return tensor;
    }
    Tensor::from_dispatch(as_float(tensor).cast(dtype).into_dispatch())
}

/// Casts half precision to single precision, for sums over ranks. Other element types are returned
/// unchanged.
pub(super) fn in_single<const D: usize, K: Kind>(tensor: Tensor<D, K>) -> Tensor<D, K> {
    let dtype = tensor.dtype();
    if dtype.is_float() && dtype.size() < 4 {
        cast(tensor, DType::F32)
    } else {
        tensor
    }
}

/// Creates zeros with the kind, dtype and device of `like`.
pub(super) fn zeros<const D: usize, K: Kind>(shape: Shape, like: &Tensor<D, K>) -> Tensor<D, K> {
    Tensor::zeros(shape, (&like.device(), like.dtype()))
}

/// Copies a plain view to a buffer of exactly its size. A Flex tensor that already fills its buffer
/// is returned unchanged.
pub(crate) fn own(view: DispatchTensor) -> DispatchTensor {
    #[cfg(feature = "flex")]
    if let Ok(kind) =
        <DispatchTensor as DispatchKindConversion<Flex>>::try_into_backend(view.clone())
    {
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

/// Returns true if the autodiff graph would record an operation on `tensor`.
pub(crate) fn is_tracked<const D: usize, K: Kind>(tensor: &Tensor<D, K>) -> bool {
    float_ref(tensor).is_some_and(Tensor::is_tracked)
}

/// Returns true if a tensor of this kind on this device may be tracked. Unlike [`is_tracked`], it
/// is the same on all ranks: of one program, some ranks may detach what others track.
pub(super) fn may_be_tracked<const D: usize, K: Kind>(tensor: &Tensor<D, K>) -> bool {
    float_ref(tensor).is_some_and(Tensor::is_autodiff)
}

/// Returns true if `tensor` is a leaf whose gradient is kept.
pub(super) fn is_require_grad<const D: usize, K: Kind>(tensor: &Tensor<D, K>) -> bool {
    float_ref(tensor).is_some_and(|float| float.is_autodiff() && float.is_require_grad())
}

/// Returns `tensor` as a float tensor if `K` is [`Float`](burn::tensor::Float), which is known at
/// compile time.
fn float_ref<const D: usize, K: Kind>(tensor: &Tensor<D, K>) -> Option<&Tensor<D>> {
    (tensor as &dyn Any).downcast_ref()
}

/// Converts a tensor of kind `K`, which the caller knows to be [`Float`](burn::tensor::Float).
pub(crate) fn as_float<const D: usize, K: Kind>(tensor: Tensor<D, K>) -> Tensor<D> {
    Tensor::from_dispatch(tensor.into_dispatch())
}

/// Returns `plain`, untracked, with the autodiff association of a tensor whose checkpointing
/// strategy is `strategy`. Without a strategy, it remains a tensor without autodiff.
pub(crate) fn associate<const D: usize, K: Kind>(
    plain: Tensor<D, K>,
    strategy: Option<GradientCheckpointingStrategy>,
) -> Tensor<D, K> {
    match strategy {
        Some(strategy) => plain
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
        None => plain,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Bool, Device, Float, Int, Tensor};

    use super::*;

    /// A view that is the only handle of its buffer is copied too, although burn would return the
    /// buffer itself.
    #[cfg(feature = "flex")]
    #[test]
    fn what_is_owned_is_in_lasting_memory() {
        for view in [
            memory::tests::foreign(2),
            memory::tests::foreign(2).narrow(0, 1, 1),
        ] {
            let shape = view.layout().shape().clone();
            let owned = own_flex(view);
            assert!(memory::is_lasting(&owned));
            assert_eq!(*owned.layout().shape(), shape);
        }
        let own = memory::copied(&memory::tests::foreign(2));
        let address = own.bytes().as_ptr();
        assert_eq!(
            own_flex(own).bytes().as_ptr(),
            address,
            "a tensor that fills its buffer is not copied"
        );
    }

    /// Tests the generic copy, on an arbitrary backend.
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
