//! Layers over images and signals.

use burn::module::{Module, ModuleDisplay};
use burn::nn::conv::{
    Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
    ConvTranspose3dConfig, DeformConv2dConfig,
};
use burn::nn::interpolate::{Interpolate1dConfig, Interpolate2dConfig, InterpolateMode};
use burn::nn::pool::{
    AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AdaptiveAvgPool3dConfig, AvgPool1dConfig,
    AvgPool2dConfig, MaxPool1dConfig, MaxPool2dConfig,
};
use burn::nn::{
    Fold4dConfig, PaddingConfig1d, PaddingConfig2d, PaddingConfig3d, PixelShuffleConfig,
    PixelUnshuffleConfig, Unfold4dConfig,
};
use burn::tensor::Device;
use burn_dtensor::dtensor::DTensorError;
use burn_dtensor::dtensor::ops::RedistributePolicy;
use burn_dtensor::nn::DTensorForward;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::misuse::refused;
use super::same::{same, same_under};
use super::{Only, floats, near};
use crate::fsdp::support::{on_device, tensor, values};

use Placement::{Replicate as R, Shard as S};

/// Where the ranks share output channels, input channels, or the batch.
fn plans(outputs: Placement, inputs: Placement) -> [Plan; 4] {
    [
        Plan::new(),
        Plan::new()
            .with_style("layer", S(0))
            .with_style("layer.weight", outputs),
        Plan::new().with_style("layer.weight", Style::placed(inputs).with_output(R)),
        Plan::new().with_style("layer", Style::placed(R).with_input(S(0)).with_output(S(1))),
    ]
}

/// The layer under each of [`plans`].
macro_rules! convolutions {
    ($outputs:expr, $inputs:expr; $($layer:expr, $shape:expr);* $(;)?) => {$(
        for at in 0..4 {
            same_under!($layer, $shape, [plans($outputs, $inputs)[at].clone()]);
        }
    )*};
}

#[test]
fn convolutions_equal_burns() {
    let device = Device::flex();
    convolutions! {
        S(0), S(1);
        Conv1dConfig::new(3, 4, 3).with_stride(2).with_padding(PaddingConfig1d::Explicit(2, 1)).init(&device), [3, 3, 6];
        Conv1dConfig::new(4, 6, 4).with_padding(PaddingConfig1d::Same).with_stride(3).init(&device), [2, 4, 5];
        Conv1dConfig::new(4, 4, 2).with_groups(2).with_dilation(2).with_bias(false).init(&device), [2, 4, 5];
        Conv2dConfig::new([3, 5], [3, 2]).with_padding(PaddingConfig2d::Same).init(&device), [3, 3, 4, 3];
        Conv2dConfig::new([2, 4], [2, 2])
            .with_padding(PaddingConfig2d::Explicit(1, 0, 2, 1))
            .with_stride([2, 1])
            .with_bias(false)
            .init(&device), [5, 2, 3, 3];
        Conv3dConfig::new([2, 3], [3, 1, 2])
            .with_padding(PaddingConfig3d::Explicit(1, 0, 1))
            .init(&device), [3, 2, 2, 2, 3];
        Conv3dConfig::new([2, 2], [1, 3, 1]).with_padding(PaddingConfig3d::Same).init(&device), [2, 2, 2, 2, 2];
    }
}

#[test]
fn transposed_convolutions_equal_burns() {
    let device = Device::flex();
    convolutions! {
        S(1), S(0);
        ConvTranspose1dConfig::new([3, 4], 3).with_stride(2).with_padding(1).with_padding_out(1).init(&device), [3, 3, 4];
        ConvTranspose1dConfig::new([4, 4], 2).with_dilation(2).with_bias(false).init(&device), [2, 4, 3];
        ConvTranspose2dConfig::new([3, 5], [2, 3]).with_stride([1, 2]).with_padding([0, 1]).init(&device), [3, 3, 3, 2];
        ConvTranspose3dConfig::new([2, 3], [1, 2, 2]).with_stride([2, 1, 1]).init(&device), [3, 2, 2, 2, 1];
    }
    // Of several groups the weight's first dimension holds whole ones.
    let grouped = ConvTranspose1dConfig::new([4, 4], 2)
        .with_groups(2)
        .with_bias(false)
        .init(&device);
    same_under!(
        grouped.clone(),
        [2, 4, 3],
        [Plan::new(), Plan::new().with_style("layer.weight", S(0))]
    );
}

#[test]
fn deformable_convolutions_equal_burns() {
    let device = Device::flex();
    let config = DeformConv2dConfig::new([4, 6], [3, 1]).with_padding(PaddingConfig2d::Same);
    for (layer, offsets, masked) in [
        (config.clone().init(&device), 1, false),
        (
            config
                .with_weight_groups(2)
                .with_offset_groups(2)
                .with_bias(false)
                .init(&device),
            2,
            true,
        ),
    ] {
        let outputs = || Plan::new().with_style("layer", S(0));
        for plan in [Plan::new, outputs as fn() -> Plan] {
            same(
                layer.clone(),
                &plan,
                [3, 4, 3, 2],
                |layer, x| {
                    let moved = x
                        .clone()
                        .repeat_dim(1, 2 * offsets)
                        .slice_dim(1, 0..6 * offsets);
                    let mask = x.clone().slice_dim(1, 0..3).repeat_dim(1, offsets) + 1.0;
                    layer.forward(x, moved * 0.4, masked.then_some(mask))
                },
                |layer, x| {
                    let moved = x
                        .clone()
                        .repeat_dim(1, 2 * offsets)
                        .slice_dim(1, 0..6 * offsets);
                    let mask = x.clone().slice_dim(1, 0..3).repeat_dim(1, offsets) + 1.0;
                    layer.forward_dtensor((x, moved * 0.4, masked.then_some(mask)))
                },
            );
        }
    }
}

#[test]
fn pools_equal_burns() {
    let (same_1d, valid_2d) = (PaddingConfig1d::Same, PaddingConfig2d::Explicit(1, 0, 0, 1));
    same_under!(
        MaxPool1dConfig::new(3)
            .with_stride(2)
            .with_padding(same_1d.clone())
            .init(),
        [3, 2, 6],
        [Plan::new()]
    );
    same_under!(
        MaxPool1dConfig::new(2)
            .with_dilation(2)
            .with_ceil_mode(true)
            .init(),
        [3, 2, 6],
        [Plan::new()]
    );
    same_under!(
        MaxPool2dConfig::new([2, 3])
            .with_padding(valid_2d.clone())
            .init(),
        [5, 2, 4, 5],
        [Plan::new()]
    );
    same_under!(
        AvgPool1dConfig::new(3)
            .with_padding(same_1d)
            .with_stride(1)
            .init(),
        [3, 2, 6],
        [Plan::new()]
    );
    let uncounted = AvgPool2dConfig::new([2, 2])
        .with_padding(valid_2d)
        .with_count_include_pad(false);
    same_under!(
        uncounted.with_strides([1, 2]).init(),
        [3, 2, 4, 5],
        [Plan::new()]
    );
    same_under!(
        AvgPool2dConfig::new([2, 2]).with_ceil_mode(true).init(),
        [3, 2, 5, 3],
        [Plan::new()]
    );
    same_under!(
        AdaptiveAvgPool1dConfig::new(3).init(),
        [3, 2, 6],
        [Plan::new()]
    );
    same_under!(
        AdaptiveAvgPool2dConfig::new([1, 2]).init(),
        [3, 2, 5, 4],
        [Plan::new()]
    );
    same_under!(
        AdaptiveAvgPool3dConfig::new([1, 2, 1]).init(),
        [3, 2, 2, 4, 3],
        [Plan::new()]
    );
}

#[test]
fn shuffled_and_resized_images_equal_burns() {
    same_under!(
        PixelShuffleConfig::new(2).init(),
        [3, 8, 2, 3],
        [Plan::new()]
    );
    same_under!(
        PixelUnshuffleConfig::new(2).init(),
        [3, 2, 4, 6],
        [Plan::new()]
    );
    same_under!(
        Unfold4dConfig::new([2, 2]).with_padding([1, 0]).init(),
        [3, 2, 3, 3],
        [Plan::new()]
    );
    let columns = Unfold4dConfig::new([2, 1])
        .with_stride([2, 1])
        .with_dilation([1, 2]);
    same_under!(columns.init(), [3, 2, 4, 3], [Plan::new()]);
    let images = Fold4dConfig::new([4, 3], [2, 2]).with_stride([2, 1]);
    same_under!(images.init(), [3, 8, 4], [Plan::new()]);
    let linear = Interpolate1dConfig::new().with_mode(InterpolateMode::Linear);
    same_under!(
        linear.with_output_size(Some(7)).init(),
        [3, 2, 4],
        [Plan::new()]
    );
    same_under!(
        Interpolate1dConfig::new()
            .with_scale_factor(Some(1.5))
            .init(),
        [3, 2, 4],
        [Plan::new()]
    );
    let cubic = Interpolate2dConfig::new()
        .with_mode(InterpolateMode::Cubic)
        .with_align_corners(false);
    same_under!(
        cubic.with_output_size(Some([5, 3])).init(),
        [3, 2, 4, 4],
        [Plan::new()]
    );
    same_under!(
        Interpolate2dConfig::new()
            .with_scale_factor(Some([2.0, 0.5]))
            .init(),
        [3, 2, 4, 4],
        [Plan::new()]
    );
}

/// Each rank computes its images, and nothing is sent.
#[test]
fn a_batch_that_is_sharded_stays_with_its_ranks() {
    fn stays<L, const D: usize>(layer: L, shape: [usize; D])
    where
        L: Module + ModuleDisplay + Sync + DTensorForward<DTensor<D>, Output = DTensor<D>>,
    {
        let _ = values(
            &Only {
                layer: layer.clone(),
            },
            None,
        ); // Draw now, on one thread.
        MeshTest::new([2], ["batch"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = parallelize(
                Only {
                    layer: on_device(&layer, &device),
                },
                mesh,
                Plan::new(),
            )?;
            let x = DTensor::distribute_replicated(tensor(3, shape, &device), mesh, &[S(0)])?;
            mesh.world().ledger().reset();
            let y = RedistributePolicy::Deny.run(|| model.layer.forward_dtensor(x));
            let name = std::any::type_name::<L>();
            assert_eq!(y.placements(), [S(0)], "{name}");
            assert_eq!(mesh.world().ledger().total(|_| true).calls, 0, "{name}");
            Ok(())
        });
    }
    let device = Device::flex();
    stays(Conv1dConfig::new(2, 3, 2).init(&device), [3, 2, 4]);
    stays(
        Conv2dConfig::new([2, 3], [2, 2]).init(&device),
        [3, 2, 4, 4],
    );
    stays(
        ConvTranspose1dConfig::new([2, 3], 2).init(&device),
        [3, 2, 4],
    );
    stays(
        ConvTranspose2dConfig::new([2, 3], [2, 2]).init(&device),
        [3, 2, 4, 4],
    );
    stays(MaxPool2dConfig::new([2, 2]).init(), [3, 2, 4, 4]);
    stays(AvgPool1dConfig::new(2).init(), [3, 2, 4]);
    stays(AdaptiveAvgPool2dConfig::new([1, 1]).init(), [3, 2, 4, 4]);
    stays(PixelShuffleConfig::new(2).init(), [3, 4, 2, 2]);
    stays(
        Interpolate1dConfig::new().with_output_size(Some(3)).init(),
        [3, 2, 4],
    );
}

/// A signal shorter than one window of burn's is padded as burn pads it.
#[test]
fn padding_keeps_the_length_of_any_signal() {
    let layer = Only {
        layer: Conv1dConfig::new(1, 1, 4)
            .with_padding(PaddingConfig1d::Same)
            .init(&Device::flex()),
    };
    for len in 1..6 {
        let x = tensor(len as u64, [1, 1, len], &Device::flex());
        let expected = floats(layer.layer.forward(x.clone()));
        MeshTest::new([1], ["tp"]).run(|mesh| {
            let layer = parallelize(layer.clone(), mesh, Plan::new())?;
            let y =
                layer
                    .layer
                    .forward_dtensor(DTensor::distribute_replicated(x.clone(), mesh, &[R])?);
            near(&floats(y.full_tensor()?), &expected, || {
                format!("{len} elements")
            });
            Ok(())
        });
    }
}

/// Windows of other images, offsets of another kernel, padding that is not the same on both sides.
#[test]
fn windows_and_offsets_that_do_not_fit_are_typed_errors() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device();
        let x = |shape| DTensor::<4>::ones(shape, mesh, &[R], device);
        let (small, image, offset) = (x([2, 1, 1, 1])?, x([2, 1, 3, 3])?, x([2, 8, 2, 3])?);
        let columns = DTensor::<3>::ones([2, 4, 5], mesh, &[R], device)?;
        let deform = |padding| {
            let layer = DeformConv2dConfig::new([1, 1], [2, 2])
                .with_padding(padding)
                .init(device);
            parallelize(Only { layer }, mesh, Plan::new())
        };
        let (valid, same) = (
            deform(PaddingConfig2d::Valid)?,
            deform(PaddingConfig2d::Explicit(0, 0, 1, 1))?,
        );
        for (error, why) in [
            (
                refused(|| Unfold4dConfig::new([2, 2]).init().forward_dtensor(small)),
                "longer than the padded input",
            ),
            (
                refused(|| {
                    Fold4dConfig::new([3, 3], [2, 2])
                        .init()
                        .forward_dtensor(columns)
                }),
                "an image of 3 x 3",
            ),
            (
                refused(|| {
                    valid
                        .layer
                        .forward_dtensor((image.clone(), offset.clone(), None))
                }),
                "the height and width of the output",
            ),
            (
                refused(|| same.layer.forward_dtensor((image, offset, None))),
                "0 before and 1 after",
            ),
        ] {
            assert!(
                matches!(error, Error::DTensor(DTensorError::Operands { .. })),
                "{error}"
            );
            assert!(error.to_string().contains(why), "{error}");
        }
        Ok(())
    });
}

#[test]
fn images_that_cannot_be_shuffled_are_a_typed_error() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = |shape| DTensor::<4>::ones(shape, mesh, &[R], mesh.device());
        let (odd, tall) = (x([2, 6, 2, 2])?, x([2, 1, 3, 2])?);
        let misfits = [
            refused(|| PixelShuffleConfig::new(2).init().forward_dtensor(odd)),
            refused(|| PixelUnshuffleConfig::new(2).init().forward_dtensor(tall)),
        ];
        for error in misfits {
            assert!(
                matches!(error, Error::DTensor(DTensorError::Operands { .. })),
                "{error}"
            );
            assert!(error.to_string().contains("factor 2"), "{error}");
        }
        Ok(())
    });
}
