//! [`Kind`]: floats, integers or booleans.

use burn::tensor::{DType, kind};

/// Kinds of tensor that a [`DTensor`](super::DTensor) supports: [`Float`](burn::tensor::Float),
/// [`Int`](burn::tensor::Int) and [`Bool`](burn::tensor::Bool). Only floats have gradients.
pub trait Kind: kind::Autodiff + 'static {}
impl<K: kind::Autodiff + 'static> Kind for K {}

/// Returns the kind of tensors with this element type.
pub(super) fn kind_of(dtype: DType) -> kind::Kind {
    match dtype {
        DType::Bool(_) => kind::Kind::Bool,
        _ if dtype.is_int() || dtype.is_uint() => kind::Kind::Int,
        // Quantized floats are among them.
        _ => kind::Kind::Float,
    }
}

/// Returns true if tensors of kind `K` can have elements of this type.
pub(super) fn is_of_kind<K: Kind>(dtype: DType) -> bool {
    K::KIND == kind_of(dtype)
}

/// Returns true if a tensor with elements of type `from` can be cast to `to`: both are floats,
/// integers or booleans, and neither is quantized.
pub(crate) fn is_castable(from: DType, to: DType) -> bool {
    let is_quantized = |dtype| matches!(dtype, DType::QFloat(_));
    from == to || kind_of(from) == kind_of(to) && !is_quantized(from) && !is_quantized(to)
}
