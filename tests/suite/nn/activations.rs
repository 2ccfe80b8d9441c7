//! Activation layers, by themselves and in burn's wrapper of all.

use burn::nn::Identity;
use burn::nn::activation::*;
use burn::tensor::Device;
use burn_dtensor::dtensor::ops::random;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::floats;
use super::same::{same, same_under};
use crate::fsdp::support::tensor;

use Placement::Shard as S;

#[test]
fn activations_and_gates_equal_burns() {
    let device = Device::flex();
    macro_rules! activations {
        ($($layer:expr),* $(,)?) => {$( same_under!($layer, [3, 5], [Plan::new()]); )*};
    }
    activations! {
        Gelu::new(), Gelu { approximate: true }, Relu::new(), Sigmoid::new(), SiLU::new(), Tanh::new(), Mish::new(),
        LogSigmoid::new(), HardSwish::new(),
    }
    let leaky: LeakyRelu = LeakyReluConfig::new().init();
    let hard: HardSigmoid = HardSigmoidConfig::new().init();
    let elu: Elu = EluConfig::new().init();
    let softplus: Softplus = SoftplusConfig::new().init();
    activations! { leaky, hard, elu, softplus }
    activations! {
        Identity::new(), Relu6::new(), Selu::new(), Softsign::new(), Tanhshrink::new(), CeluConfig::new().init(),
        HardtanhConfig::new().with_max_val(0.3).init(), HardShrinkConfig::new().with_lambda(0.2).init(),
        SoftShrinkConfig::new().with_lambda(0.2).init(), ShrinkConfig::new().with_lambda(0.2).init(),
        ThresholdConfig::new(0.1, 0.4).init(), ThresholdedReluConfig::new().with_alpha(0.2).init(),
        PReluConfig::new().init(&device), PReluConfig::new().with_num_parameters(5).init(&device),
    }
    same_under!(
        SwiGluConfig::new(4, 6).with_bias(true).init(&device),
        [3, 4],
        [
            Plan::new(),
            Plan::new().with_style("layer.*", Style::colwise()),
        ]
    );
}

/// A slope a channel, cut with the channels.
#[test]
fn slopes_may_be_sharded_with_their_channels() {
    let layer = PReluConfig::new()
        .with_num_parameters(5)
        .init(&Device::flex());
    let split = || Plan::new().with_style("layer", Style::placed(S(0)).with_input(S(1)));
    same_under!(layer, [3, 5, 2], [split()]);
}

#[test]
fn every_activation_of_the_wrapper_equals_burns() {
    let device = Device::flex();
    let configs = [
        ActivationConfig::Gelu,
        ActivationConfig::GeluApproximate,
        ActivationConfig::PRelu(PReluConfig::new()),
        ActivationConfig::Relu,
        ActivationConfig::LeakyRelu(LeakyReluConfig::new()),
        ActivationConfig::SwiGlu(SwiGluConfig::new(5, 5)),
        ActivationConfig::Selu,
        ActivationConfig::Sigmoid,
        ActivationConfig::Tanh,
        ActivationConfig::HardSigmoid(HardSigmoidConfig::new()),
        ActivationConfig::HardSwish,
        ActivationConfig::Softplus(SoftplusConfig::new()),
        ActivationConfig::Softsign,
        ActivationConfig::Elu(EluConfig::new()),
        ActivationConfig::Celu(CeluConfig::new()),
        ActivationConfig::ThresholdedRelu(ThresholdedReluConfig::new()),
        ActivationConfig::HardShrink(HardShrinkConfig::new()),
        ActivationConfig::SoftShrink(SoftShrinkConfig::new()),
        ActivationConfig::Shrink(ShrinkConfig::new()),
    ];
    same_under!(Activation::from(Identity::new()), [3, 5], [Plan::new()]);
    for config in configs {
        same_under!(config.init(&device), [3, 5], [Plan::new()]);
    }
}

/// Slopes and noise follow an element's place in the whole tensor; outside of training there are
/// none.
#[test]
fn drawn_slopes_and_noise_are_the_same_on_every_mesh() {
    let (slopes, noise) = (
        RReluConfig::new().init(),
        burn::nn::GaussianNoiseConfig::new(0.5).init(),
    );
    let run = |ranks: usize| {
        let outputs = MeshTest::new([ranks], ["tp"]).run(|mesh| {
            let x = |device: &Device| {
                DTensor::<2>::distribute_replicated(tensor(3, [6, 5], device), mesh, &[S(0)])
            };
            let resting = floats(
                noise
                    .forward_dtensor(slopes.forward_dtensor(x(mesh.device())?))
                    .full_tensor()?,
            );
            assert_eq!(
                resting,
                floats(slopes.forward(tensor::<2>(3, [6, 5], mesh.device()))),
                "as burn's"
            );
            random::seed(9);
            let device = mesh.device().clone().autodiff();
            let sloped = floats(slopes.forward_dtensor(x(&device)?).full_tensor()?.inner());
            let noisy = floats(noise.forward_dtensor(x(&device)?).full_tensor()?.inner());
            Ok((sloped, noisy))
        });
        outputs.into_iter().next().expect("a rank")
    };
    let (sloped, noisy) = run(1);
    let x = floats(tensor::<2>(3, [6, 5], &Device::flex()));
    for ((x, sloped), noisy) in x.iter().zip(&sloped).zip(&noisy) {
        let slope = sloped / x;
        assert!(
            if *x < 0.0 {
                (0.124..0.334).contains(&slope)
            } else {
                slope == 1.0
            },
            "{x} became {sloped}"
        );
        assert!((noisy - x).abs() < 3.0, "{x} became {noisy}");
    }
    let deviation = (x
        .iter()
        .zip(&noisy)
        .map(|(x, noisy)| (noisy - x).powi(2))
        .sum::<f32>()
        / x.len() as f32)
        .sqrt();
    assert!((0.3..0.7).contains(&deviation), "{deviation}");
    for ranks in [2, 4] {
        assert_eq!(run(ranks), (sloped.clone(), noisy.clone()), "{ranks} ranks");
    }
}
