//! [`Kind`]: floats, integers or booleans.

use burn::tensor::{DType, kind};

/// Kinds of tensor that a [`DTensor`](super::DTensor) supports: [`Float`](burn::tensor::Float),
/// [`Int`](burn::tensor::Int) and [`Bool`](burn::tensor::Bool). Only floats have gradients.
pub trait Kind: kind::Autodiff + 'static {}
impl<K: kind::Autodiff + 'static> Kind for K {}

/// Returns true if tensors of kind `K` can have elements of this type.
pub(super) fn is_of_kind<K: Kind>(dtype: DType) -> bool {
    match K::KIND {
        kind::Kind::Float => dtype.is_float(),
        kind::Kind::Bool => dtype.is_bool(),
        kind::Kind::Int => !dtype.is_float() && !dtype.is_bool(),
    }
}
