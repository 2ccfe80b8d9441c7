//! Forward of burn-nn's activation layers over DTensors.

use burn::nn::Identity;
use burn::nn::activation::{
    Activation, Celu, Elu, Gelu, HardShrink, HardSigmoid, HardSwish, Hardtanh, LeakyRelu,
    LogSigmoid, Mish, PRelu, Relu, Relu6, Selu, Shrink, SiLU, Sigmoid, SoftShrink, Softplus,
    Softsign, Tanh, Tanhshrink, Threshold, ThresholdedRelu,
};

use super::{DTensorForward, apply_style};
use crate::dtensor::DTensor;
use crate::dtensor::ops::{activation as f, operand_error};

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
    Identity(_identity, x) => x,
    Relu6(_relu, x) => f::relu6(x),
    Selu(_selu, x) => f::selu(x),
    Celu(celu, x) => f::celu(x, celu.alpha),
    Softsign(_softsign, x) => f::softsign(x),
    Tanhshrink(_tanhshrink, x) => f::tanhshrink(x),
    Hardtanh(hard, x) => f::hardtanh(x, hard.min_val, hard.max_val),
    HardShrink(hard, x) => f::hard_shrink(x, hard.lambda),
    SoftShrink(soft, x) => f::soft_shrink(x, soft.lambda),
    Shrink(shrink, x) => f::shrink(x, shrink.lambda, shrink.bias),
    Threshold(threshold, x) => f::threshold(x, threshold.threshold, threshold.value),
    ThresholdedRelu(thresholded, x) => f::thresholded_relu(x, thresholded.alpha),
    PRelu(prelu, x) => apply_style(&prelu.alpha, x, |x, alpha| f::prelu(x, alpha)),
}

macro_rules! any_of {
    ($($Layer:ident),* $(,)?) => {
        impl<const D: usize> DTensorForward<DTensor<D>> for Activation {
            type Output = DTensor<D>;

            fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
                match self {
                    $(Self::$Layer(layer) => layer.forward_dtensor(x),)*
                    _ => operand_error("activation", &[x.shape()], "this layer has no forward over DTensors").unwind(),
                }
            }
        }
    };
}

any_of! {
    Identity, Gelu, PRelu, Relu, LeakyRelu, SwiGlu, Selu, Sigmoid, Tanh, HardSigmoid, HardSwish, Softplus, Softsign,
    Elu, Celu, ThresholdedRelu, HardShrink, SoftShrink, Shrink,
}
