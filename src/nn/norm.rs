//! Normalization layers that need nothing of other rows: all but [`BatchNorm`](burn::nn::BatchNorm).

use burn::module::Param;
use burn::nn::norm::Normalization;
use burn::nn::{GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RmsNorm};
use burn::tensor::Tensor;

use super::{DTensorForward, apply_style, read};
use crate::dtensor::DTensor;
use crate::dtensor::ops::{EinsumRule, apply, module, operand_error};

/// Across channels.
const LOCAL_RESPONSE: EinsumRule = EinsumRule::new("local_response_norm", "bC.. -> bC..");

/// Under sequence parallelism gamma and beta get a term of their gradient on every rank; all those
/// of a unit are added up at once.
impl<const D: usize> DTensorForward<DTensor<D>> for LayerNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        apply_style(&self.gamma, x, |x, gamma| {
            let beta = self.beta.as_ref().map(read);
            module::layer_norm_by(x, gamma, beta, |x, gamma, beta| {
                // burn keeps the layer's epsilon to itself: the layer computes, with what it is given.
                let mut layer = self.clone();
                layer.gamma = Param::initialized(layer.gamma.id, gamma);
                layer.beta = layer.beta.zip(beta).map(|(own, beta)| Param::initialized(own.id, beta));
                layer.forward(x)
            })
        })
    }
}

/// As [`LayerNorm`].
impl<const D: usize> DTensorForward<DTensor<D>> for RmsNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        apply_style(&self.gamma, x, |x, gamma| module::rms_norm(x, gamma, self.epsilon))
    }
}

/// Of whole groups of channels each rank may hold some.
impl<const D: usize> DTensorForward<DTensor<D>> for GroupNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        grouped(x, self.num_groups, self.gamma.as_ref().zip(self.beta.as_ref()), self.epsilon)
    }
}

/// Each rank may hold some of the channels.
impl<const D: usize> DTensorForward<DTensor<D>> for InstanceNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        if D < 2 || x.dims()[1] != self.num_channels {
            let why = format!("the layer has {} channels, and so must dimension 1", self.num_channels);
            operand_error("instance_norm", &[x.shape()], why).unwind();
        }
        grouped(x, self.num_channels, self.gamma.as_ref().zip(self.beta.as_ref()), self.epsilon)
    }
}

type Vector = Param<Tensor<1>>;

/// Normalization of groups of channels.
#[track_caller]
fn grouped<const D: usize>(
    x: DTensor<D>,
    groups: usize,
    gamma_beta: Option<(&Vector, &Vector)>,
    epsilon: f64,
) -> DTensor<D> {
    match gamma_beta {
        Some((gamma, beta)) => {
            apply_style(gamma, x, |x, gamma| module::group_norm(x, Some((gamma, read(beta))), groups, epsilon))
        }
        None => module::group_norm(x, None, groups, epsilon),
    }
}

/// Channels are made whole; burn keeps the layer's numbers to itself, so that it computes by itself.
impl<const D: usize> DTensorForward<DTensor<D>> for LocalResponseNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        if D < 3 {
            operand_error("local_response_norm", &[x.shape()], "the input needs dimensions behind its channels")
                .unwind();
        }
        apply(&LOCAL_RESPONSE, x, |x, _| self.forward(x))
    }
}

impl<const D: usize> DTensorForward<DTensor<D>> for Normalization {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        match self {
            Self::Identity(norm) => norm.forward_dtensor(x),
            Self::Batch(norm) => norm.forward_dtensor(x),
            Self::Group(norm) => norm.forward_dtensor(x),
            Self::Instance(norm) => norm.forward_dtensor(x),
            Self::Layer(norm) => norm.forward_dtensor(x),
            Self::Rms(norm) => norm.forward_dtensor(x),
            _ => operand_error("normalization", &[x.shape()], "this layer has no forward over DTensors").unwind(),
        }
    }
}
