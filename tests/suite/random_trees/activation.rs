//! [`Activation`]: what a tree computes with, of one rank alone or of tensor-parallel ranks together.

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::fsdp::{ParamExt, TensorTree};
use burn_dtensor::nn::DTensorForward;
use burn_dtensor::placement::Placement;
use burn_dtensor::{Error, Result};

/// `[batch, seq, width]`.
pub trait Activation: TensorTree + Clone + Send + 'static {
    /// The layer's output; `flat`: of rows in two dimensions.
    fn layer(self, layer: &Linear, flat: bool) -> Self;

    /// The output of a layer that computes with whole weights.
    fn local_layer(self, layer: &Linear, flat: bool) -> Self;

    fn times(self, factor: &Param<Tensor<1>>) -> Self;

    fn plus(self, other: Self) -> Self;

    fn tanh(self) -> Self;
}

impl Activation for Tensor<3> {
    fn layer(self, layer: &Linear, flat: bool) -> Self {
        if !flat {
            return layer.forward(self);
        }
        let [batch, seq, width] = self.dims();
        let y = layer.forward(self.reshape([batch * seq, width]));
        let width = y.dims()[1];
        y.reshape([batch, seq, width])
    }

    fn local_layer(self, layer: &Linear, flat: bool) -> Self {
        self.layer(layer, flat)
    }

    fn times(self, factor: &Param<Tensor<1>>) -> Self {
        let dtype = self.dtype();
        self * factor.val().cast(dtype).unsqueeze()
    }

    fn plus(self, other: Self) -> Self {
        self + other
    }

    fn tanh(self) -> Self {
        self.tanh()
    }
}

impl Activation for DTensor<3> {
    fn layer(self, layer: &Linear, flat: bool) -> Self {
        if !flat {
            return layer.forward_dtensor(self);
        }
        let [batch, seq, width] = self.dims();
        let y = layer.forward_dtensor(self.reshape([batch * seq, width]));
        let width = y.dims()[1];
        y.reshape([batch, seq, width])
    }

    fn local_layer(self, layer: &Linear, flat: bool) -> Self {
        let mesh = self.mesh().clone();
        let y = or_unwind(self.full_tensor()).layer(layer, flat);
        or_unwind(Self::from_local(y, &mesh, &[Placement::Replicate]))
    }

    fn times(self, factor: &Param<Tensor<1>>) -> Self {
        let dtype = self.dtype();
        self * or_unwind(factor.dtensor()).cast(dtype).unsqueeze()
    }

    fn plus(self, other: Self) -> Self {
        self + other
    }

    fn tanh(self) -> Self {
        self.tanh()
    }
}

pub fn or_unwind<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error: Error| error.unwind())
}
