//! [`Kind`]: floats, integers or booleans.

use burn::tensor::kind;

/// Kinds of tensor a [`DTensor`](super::DTensor) can be: [`Float`](burn::tensor::Float), [`Int`](burn::tensor::Int) and
/// [`Bool`](burn::tensor::Bool). Only floats have gradients.
pub trait Kind: kind::Autodiff + 'static {}
impl<K: kind::Autodiff + 'static> Kind for K {}
