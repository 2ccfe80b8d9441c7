//! Tensors without elements.
//!
//! burn-flex 0.22 aborts on some operators of such, and burn answers others from the shapes alone,
//! outside the autodiff graph, though a gradient is asked of them. [`apply`](super::apply) makes their
//! results by itself. That one rank's part alone is empty does not happen to operators that are not made for
//! it: see [`takes_empty_parts`](super::ShardingRule::supports_empty_shards).

use burn::tensor::{DType, Device, Shape, Tensor, kind};

use crate::dtensor::Kind;
use crate::dtensor::kind::is_of_kind;
use crate::dtensor::local::{as_float, zeros};

/// What results without elements are made of: zero in the graph of all inputs, and their element types.
#[derive(Debug, Default)]
pub struct EmptyOutput {
    zero: Option<Tensor<1>>,
    dtypes: Vec<DType>,
    device: Option<Device>,
}

impl EmptyOutput {
    /// An input.
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

    /// A result of this shape, of no elements.
    pub(super) fn make<const O: usize, K: Kind>(&self, shape: &Shape) -> Tensor<O, K> {
        if K::KIND == kind::Kind::Float
            && let Some(zero) = &self.zero
        {
            return Tensor::from_dispatch(zero.clone().expand::<O, _>(shape.clone()).into_dispatch());
        }
        let device = self.device.as_ref().expect("an operator has an input");
        match self.dtypes.iter().find(|dtype| is_of_kind::<K>(**dtype)) {
            Some(&dtype) => Tensor::zeros(shape.clone(), (device, dtype)),
            None => Tensor::zeros(shape.clone(), device),
        }
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
