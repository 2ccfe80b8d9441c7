//! Normalizations of one row each, and the wrapper of all.

use burn::nn::norm::{Normalization, NormalizationConfig};
use burn::nn::{
    BatchNormConfig, GroupNormConfig, InstanceNormConfig, LayerNormConfig, LocalResponseNormConfig,
    RmsNormConfig,
};
use burn::tensor::Device;
use burn_dtensor::dtensor::DTensorError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::Only;
use super::misuse::refused;
use super::same::{same, same_under};

use Placement::{Replicate as R, Shard as S};

#[test]
fn normalizations_equal_burns() {
    let device = Device::flex();
    let sequence = || Plan::new().with_style("layer", Style::sequence_parallel());
    same_under!(
        LayerNormConfig::new(6).with_epsilon(1e-3).init(&device),
        [3, 5, 6],
        [Plan::new(), sequence()]
    );
    same_under!(
        LayerNormConfig::new(6).with_bias(false).init(&device),
        [3, 5, 6],
        [Plan::new(), sequence()]
    );
    same_under!(
        RmsNormConfig::new(6).init(&device),
        [3, 5, 6],
        [Plan::new(), sequence()]
    );
    same_under!(
        GroupNormConfig::new(2, 6).init(&device),
        [3, 6, 5],
        [Plan::new()]
    );
    let channels = || Plan::new().with_style("layer", Style::placed(S(0)).with_input(S(1)));
    same_under!(
        InstanceNormConfig::new(4).init(&device),
        [3, 4, 5],
        [Plan::new(), channels()]
    );
    let plain = InstanceNormConfig::new(3)
        .with_affine(false)
        .with_epsilon(1e-2);
    same_under!(plain.init(&device), [3, 3, 2, 2], [Plan::new()]);
}

#[test]
fn local_responses_equal_burns() {
    let layer = LocalResponseNormConfig::new(3)
        .with_alpha(0.5)
        .with_beta(0.6)
        .with_k(1.5)
        .init();
    same_under!(layer, [3, 5, 4], [Plan::new()]);
    same_under!(
        LocalResponseNormConfig::new(4).with_alpha(1.0).init(),
        [2, 3, 2, 3],
        [Plan::new()]
    );
}

/// The wrapper computes what it wraps.
#[test]
fn every_normalization_of_the_wrapper_equals_burns() {
    let device = Device::flex();
    let wrapped = |config: NormalizationConfig| config.init(&device);
    let layers: [Normalization; 6] = [
        wrapped(NormalizationConfig::Identity),
        wrapped(BatchNormConfig::new(4).into()),
        wrapped(GroupNormConfig::new(2, 4).into()),
        wrapped(InstanceNormConfig::new(4).into()),
        wrapped(LayerNormConfig::new(4).into()),
        wrapped(RmsNormConfig::new(4).into()),
    ];
    for layer in layers {
        same_under!(layer.clone(), [3, 4, 4], [Plan::new()]);
    }
}

#[test]
fn inputs_of_other_channels_are_typed_errors() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let instance = Only {
            layer: InstanceNormConfig::new(2)
                .with_affine(false)
                .init(mesh.device()),
        };
        let x = |shape| DTensor::<2>::ones(shape, mesh, &[R], mesh.device());
        let (wide, flat) = (x([3, 4])?, x([3, 4])?);
        for error in [
            refused(|| instance.layer.forward_dtensor(wide)),
            refused(|| LocalResponseNormConfig::new(2).init().forward_dtensor(flat)),
        ] {
            assert!(
                matches!(error, Error::DTensor(DTensorError::Operands { .. })),
                "{error}"
            );
        }
        Ok(())
    });
}
