//! Activation layers.

use burn::nn::activation::{
    Elu, Gelu, HardSigmoid, HardSwish, LeakyRelu, LogSigmoid, Mish, Relu, SiLU, Sigmoid, Softplus, Tanh,
};

use super::DTensorForward;
use crate::dtensor::DTensor;
use crate::dtensor::ops::activation as f;

macro_rules! layers {
    ($($Layer:ident($layer:ident, $x:ident) => $forward:expr),* $(,)?) => {$(
        impl<const D: usize> DTensorForward<DTensor<D>> for $Layer {
            type Output = DTensor<D>;

            fn forward_dtensor(&self, $x: DTensor<D>) -> DTensor<D> {
                let $layer = self;
                $forward
            }
        }
    )*};
}

layers! {
    Gelu(gelu, x) => if gelu.approximate { f::gelu_approximate(x) } else { f::gelu(x) },
    Relu(_relu, x) => f::relu(x),
    Sigmoid(_sigmoid, x) => f::sigmoid(x),
    SiLU(_silu, x) => f::silu(x),
    Tanh(_tanh, x) => f::tanh(x),
    HardSwish(_swish, x) => f::hard_swish(x),
    LeakyRelu(leaky, x) => f::leaky_relu(x, leaky.negative_slope),
    HardSigmoid(hard, x) => f::hard_sigmoid(x, hard.alpha, hard.beta),
    LogSigmoid(_log, x) => f::log_sigmoid(x),
    Mish(_mish, x) => f::mish(x),
    Elu(elu, x) => f::elu(x, elu.alpha),
    Softplus(softplus, x) => f::softplus_with_threshold(x, softplus.beta, softplus.threshold),
}
