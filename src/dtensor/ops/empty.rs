//! Results without elements.
//!
//! burn-flex 0.22 aborts in some operators on empty tensors. For others, burn computes the result
//! from the shapes alone, outside the autodiff graph, although a gradient may be requested.
//! [`apply`](super::apply) therefore creates empty results itself. An operator without [support for
//! empty shards](super::ShardingRule::supports_empty_shards) never gets a local tensor that is
//! empty on one rank only.

use burn::tensor::{DType, Device, Shape, Tensor, kind};

use crate::dtensor::Kind;
use crate::dtensor::kind::is_of_kind;
use crate::dtensor::local::{as_float, zeros};

/// Template of results without elements: a zero in the graph of all float inputs, and the element
/// types of the inputs.
#[derive(Debug, Default)]
pub struct EmptyOutput {
    zero: Option<Tensor<1>>,
    dtypes: Vec<DType>,
    device: Option<Device>,
}

impl EmptyOutput {
    /// Records an input.
    pub(super) fn see<const D: usize, K: Kind>(&mut self, input: &Tensor<D, K>) {
        let dtype = input.dtype();
        if dtype.is_float() {
            let zero = nothing(as_float(input.clone()));
            self.zero = Some(match self.zero.take() {
                Some(sum) if sum.dtype() == dtype => sum + zero,
                Some(sum) => sum.clone() + zero.cast(sum.dtype()),
                None => zero,
            });
        }
        self.dtypes.push(dtype);
        self.device.get_or_insert_with(|| input.device());
    }

    /// Makes a result of this shape, which has no elements.
    pub(super) fn make<const O: usize, K: Kind>(&self, shape: &Shape) -> Tensor<O, K> {
        if K::KIND == kind::Kind::Float
            && let Some(zero) = &self.zero
        {
            return Tensor::from_dispatch(
                zero.clone().expand::<O, _>(shape.clone()).into_dispatch(),
            );
        }
        let device = self.device.as_ref().expect("an operator has an input");
        match self.dtypes.iter().find(|dtype| is_of_kind::<K>(**dtype)) {
            Some(&dtype) => Tensor::zeros(shape.clone(), (device, dtype)),
            None => Tensor::zeros(shape.clone(), device),
        }
    }
}

/// Returns a zero that is connected to the graph of `x`: the contribution of `x` to a result that
/// does not depend on it.
pub(super) fn nothing<const D: usize, K: Kind + kind::Numeric>(x: Tensor<D, K>) -> Tensor<1, K> {
    x.sum().mul_scalar(0)
}

/// Returns a tensor of this shape filled with the one element of `x`.
pub(super) fn spread<const D: usize, K: Kind + kind::Numeric>(
    x: Tensor<1, K>,
    shape: Shape,
) -> Tensor<D, K> {
    let zeros = zeros(shape, &x.clone().unsqueeze());
    zeros + x.unsqueeze()
}
