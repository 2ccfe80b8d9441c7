//! Normalizations.

use burn::module::Param;
use burn::nn::{
    GroupNorm, GroupNormConfig, LocalResponseNorm, LocalResponseNormConfig, RmsNorm, RmsNormConfig,
};
use burn::tensor::Tensor;
use burn_dtensor::dtensor::{DTensor, ops::module};
use burn_dtensor::nn::DTensorForward;
use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("layer_norm", (x: 2 = [3, 5], gamma: 1 = [5], beta: 1 = [5]) => {
            module::layer_norm(x, gamma, Some(beta), 1e-5)
        }),
        case!("layer_norm", (x: 3 = [2, 3, 4], gamma: 1 = [4]) => module::layer_norm(x, gamma, None, 1e-5)),
        case!("rms_norm", (x: 2 = [3, 5], gamma: 1 = [5]) => x.rms_norm(gamma, 1e-5)),
        case!("rms_norm", (x: 3 = [2, 3, 4], gamma: 1 = [4]) => x.rms_norm(gamma, 1e-5)),
        case!("group_norm", (x: 3 = [3, 4, 2], gamma: 1 = [4], beta: 1 = [4]) => x.group_norm(2, Some((gamma, beta)), 1e-5)),
        case!("group_norm", (x: 2 = [3, 6]) => x.group_norm(3, None, 1e-5)),
        case!("group_norm", (x: 3 = [1, 6, 2], gamma: 1 = [6], beta: 1 = [6]) => x.group_norm(6, Some((gamma, beta)), 1e-5)),
        case!("local_response_norm", (x: 3 = [3, 4, 2]) => x.local_response_norm()),
        case!("local_response_norm", (x: 4 = [2, 3, 3, 1]) => x.local_response_norm()),
        case!("batch_norm", (x: 2 = [3, 4], gamma: 1 = [4], beta: 1 = [4], mean: 1 = [4]) => {
            module::batch_norm(x, gamma.clone(), beta, mean, gamma.square(), 1e-5)
        }),
        case!("batch_norm_train", (x: 2 = [5, 3], gamma: 1 = [3], beta: 1 = [3]) => {
            let normalized = module::batch_norm_train(x, gamma, beta, 1e-5);
            (normalized.output, normalized.mean, normalized.variance)
        }),
    ]
}

/// What burn has as layers only: held to those layers.
trait Norms: Sized {
    type Vector;

    fn rms_norm(self, gamma: Self::Vector, epsilon: f64) -> Self;
    fn group_norm(
        self,
        groups: usize,
        gamma_beta: Option<(Self::Vector, Self::Vector)>,
        epsilon: f64,
    ) -> Self;
    fn local_response_norm(self) -> Self;
}

fn local_response() -> LocalResponseNorm {
    LocalResponseNormConfig::new(3)
        .with_alpha(0.5)
        .with_beta(0.6)
        .with_k(1.5)
        .init()
}

impl<const D: usize> Norms for DTensor<D> {
    type Vector = DTensor<1>;

    fn rms_norm(self, gamma: DTensor<1>, epsilon: f64) -> Self {
        module::rms_norm(self, gamma, epsilon)
    }

    fn group_norm(
        self,
        groups: usize,
        gamma_beta: Option<(DTensor<1>, DTensor<1>)>,
        epsilon: f64,
    ) -> Self {
        module::group_norm(self, gamma_beta, groups, epsilon)
    }

    fn local_response_norm(self) -> Self {
        local_response().forward_dtensor(self)
    }
}

impl<const D: usize> Norms for Tensor<D> {
    type Vector = Tensor<1>;

    fn rms_norm(self, gamma: Tensor<1>, epsilon: f64) -> Self {
        let layer = RmsNormConfig::new(gamma.dims()[0])
            .with_epsilon(epsilon)
            .init(&gamma.device());
        RmsNorm {
            gamma: layer.gamma.map(|_| gamma),
            ..layer
        }
        .forward(self)
    }

    fn group_norm(
        self,
        groups: usize,
        gamma_beta: Option<(Tensor<1>, Tensor<1>)>,
        epsilon: f64,
    ) -> Self {
        let config = GroupNormConfig::new(groups, self.dims()[1]).with_epsilon(epsilon);
        let layer = config
            .with_affine(gamma_beta.is_some())
            .init(&self.device());
        let (gamma, beta) = gamma_beta.unzip();
        let own = |param: Option<Param<Tensor<1>>>, value| {
            param.zip(value).map(|(param, value)| param.map(|_| value))
        };
        GroupNorm {
            gamma: own(layer.gamma.clone(), gamma),
            beta: own(layer.beta.clone(), beta),
            ..layer
        }
        .forward(self)
    }

    fn local_response_norm(self) -> Self {
        local_response().forward(self)
    }
}
