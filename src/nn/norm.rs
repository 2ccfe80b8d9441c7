//! Normalization layers that need no other rows of the batch: all except
//! [`BatchNorm`](burn::nn::BatchNorm).

use burn::module::Param;
use burn::nn::norm::Normalization;
use burn::nn::{GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RmsNorm};
use burn::tensor::Tensor;

use super::{DTensorForward, apply_style, read, read_with};
use crate::dtensor::DTensor;
use crate::dtensor::ops::{EinsumRule, apply, module, operand_error};

/// Sharding rule of local response normalization, which needs all channels.
const LOCAL_RESPONSE: EinsumRule = EinsumRule::new("local_response_norm", "bC.. -> bC..");

/// Under sequence parallelism each rank computes a partial gradient of gamma and beta. All partial
/// gradients of a unit are summed in one collective.
impl<const D: usize> DTensorForward<DTensor<D>> for LayerNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        apply_style(&self.gamma, x, |x, gamma| {
            let beta = read_with(&gamma, self.beta.as_ref());
            module::layer_norm_by(x, gamma, beta, |x, gamma, beta| {
                // The layer's epsilon is private in burn, so a clone of the layer computes with the
                // given parameters.
                let mut layer = self.clone();
                layer.gamma = Param::initialized(layer.gamma.id, gamma);
                layer.beta = layer
                    .beta
                    .zip(beta)
                    .map(|(own, beta)| Param::initialized(own.id, beta));
                layer.forward(x)
            })
        })
    }
}

/// Partial gradients are summed as for [`LayerNorm`].
impl<const D: usize> DTensorForward<DTensor<D>> for RmsNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        apply_style(&self.gamma, x, |x, gamma| {
            module::rms_norm(x, gamma, self.epsilon)
        })
    }
}

/// Each rank may hold a shard of the channels that consists of complete groups.
impl<const D: usize> DTensorForward<DTensor<D>> for GroupNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        grouped(
            x,
            self.num_groups,
            self.gamma.as_ref().zip(self.beta.as_ref()),
            self.epsilon,
        )
    }
}

/// Each rank may hold a shard of the channels.
impl<const D: usize> DTensorForward<DTensor<D>> for InstanceNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        if D < 2 || x.dims()[1] != self.num_channels {
            let why = format!(
                "the layer has {} channels. Pass an input with as many",
                self.num_channels
            );
            operand_error("instance_norm", &[x.shape()], why).unwind();
        }
        grouped(
            x,
            self.num_channels,
            self.gamma.as_ref().zip(self.beta.as_ref()),
            self.epsilon,
        )
    }
}

type Vector = Param<Tensor<1>>;

/// Normalizes groups of channels.
#[track_caller]
fn grouped<const D: usize>(
    x: DTensor<D>,
    groups: usize,
    gamma_beta: Option<(&Vector, &Vector)>,
    epsilon: f64,
) -> DTensor<D> {
    match gamma_beta {
        Some((gamma, beta)) => apply_style(gamma, x, |x, gamma| {
            let beta = read(beta, gamma.mesh());
            module::group_norm(x, Some((gamma, beta)), groups, epsilon)
        }),
        None => module::group_norm(x, None, groups, epsilon),
    }
}

/// All-gathers sharded channels first. The layer's own forward computes the result, because its
/// settings are private in burn.
impl<const D: usize> DTensorForward<DTensor<D>> for LocalResponseNorm {
    type Output = DTensor<D>;

    fn forward_dtensor(&self, x: DTensor<D>) -> DTensor<D> {
        if D < 3 {
            operand_error(
                "local_response_norm",
                &[x.shape()],
                "the input needs dimensions after its channels",
            )
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
            _ => operand_error(
                "normalization",
                &[x.shape()],
                "this layer has no forward over DTensors",
            )
            .unwind(),
        }
    }
}
