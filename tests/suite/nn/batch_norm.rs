//! `BatchNorm` over a batch that ranks share, against burn's own on the whole batch: the variants
//! of PyTorch's tests of `SyncBatchNorm` (`test_DistributedDataParallel_SyncBatchNorm*`), with
//! burn's momentum and variances.

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::DTensorError;
use burn_dtensor::dtensor::ops::RedistributePolicy;
use burn_dtensor::nn::sync_batch_norm;
use burn_dtensor::prelude::*;
use burn_dtensor::replicate::{DataParallel, replicate};
use burn_dtensor::testing::MeshTest;
use serde_json::Value;

use super::misuse::refused;
use super::same::loss;
use super::{Only, floats, near};
use crate::fsdp::support::{on_device, tensor, values};
use crate::parallel::support::full_grads;

use Placement::{Replicate as R, Shard as S};

const STEPS: u64 = 3;

/// One training step: output, gradients of the input and of `beta` and `gamma`, running mean and
/// variance.
type Step = [Vec<f32>; 6];

fn layer(channels: usize) -> Only<BatchNorm> {
    let device = Device::flex();
    let mut layer = BatchNormConfig::new(channels)
        .with_momentum(0.3)
        .with_epsilon(1e-3)
        .init(&device);
    layer.gamma = layer
        .gamma
        .map(|_| tensor::<1>(5, [channels], &device) + 1.0);
    layer.beta = layer.beta.map(|_| tensor::<1>(6, [channels], &device));
    Only { layer }
}

/// A batch whose channels have means and variances of their own.
fn batch<const D: usize>(step: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    let mut channels = [1; D];
    channels[1] = shape[1];
    let [mean, scale] = [70, 80].map(|seed| tensor(seed, channels, device) * 4.0);
    tensor(step + 10, shape, device) * (scale + 3.0) + mean
}

fn running(layer: &BatchNorm) -> [Vec<f32>; 2] {
    [
        floats(layer.running_mean.value_sync().inner()),
        floats(layer.running_var.value_sync().inner()),
    ]
}

/// Steps of burn's layer on the whole batch.
fn expected<const D: usize>(model: &Only<BatchNorm>, shape: [usize; D]) -> Vec<Step> {
    let device = Device::flex().autodiff();
    let model = on_device(model, &device);
    let step = |step| {
        let x = batch(step, shape, &device).require_grad();
        let y = model.layer.forward(x.clone());
        let grads = loss(y.clone()).backward();
        let x = floats(x.grad(&grads).expect("the input is in the loss"));
        let grads = values(&model, Some(&GradientsParams::from_grads(grads, &model)));
        let [mean, variance] = running(&model.layer);
        [
            floats(y.inner()),
            x,
            grads["layer.beta"].clone(),
            grads["layer.gamma"].clone(),
            mean,
            variance,
        ]
    };
    (0..STEPS).map(step).collect()
}

/// Steps of the layer on a batch that is laid out over the ranks.
fn steps<const D: usize>(
    model: &Only<BatchNorm>,
    shape: [usize; D],
    layout: &Layout,
) -> Result<Vec<Step>> {
    let (mesh, mesh_device) = {
        let gamma = model.layer.gamma.dtensor()?;
        (gamma.mesh().clone(), gamma.local().device())
    };
    let step = |step| {
        let x = DTensor::distribute_replicated_to(
            batch(step, shape, &mesh_device),
            &mesh,
            layout.clone(),
        )?
        .require_grad();
        let leaf = x.local().clone();
        let y = unit(model, x, |model, x| model.layer.forward_dtensor(x)).full_tensor()?;
        let grads = loss(y.clone()).backward();
        let x = leaf
            .grad(&grads)
            .unwrap_or_else(|| leaf.clone().inner().zeros_like());
        let x = DTensor::from_local_with_layout(x, &mesh, layout.clone(), shape)?.full_tensor()?;
        let grads = full_grads(model, &GradientsParams::from_grads(grads, model))?;
        let [mean, variance] = running(&model.layer);
        Ok([
            floats(y.inner()),
            floats(x),
            grads["layer.beta"].clone(),
            grads["layer.gamma"].clone(),
            mean,
            variance,
        ])
    };
    (0..STEPS).map(step).collect()
}

fn hold(found: &[Step], expected: &[Step], what: impl Fn() -> String) {
    const PARTS: [&str; 6] = [
        "output",
        "gradient of the input",
        "beta's gradient",
        "gamma's gradient",
        "running mean",
        "running variance",
    ];
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (part, (found, expected)) in PARTS.iter().zip(found.iter().zip(expected)) {
            near(found, expected, || {
                format!("{}, step {step}: {part}", what())
            });
        }
    }
}

/// The layer on ranks that share a batch of `shape` in each of these lengths, and evenly.
fn shared<const D: usize>(shape: [usize; D], lengths: &[&[usize]]) {
    let model = layer(shape[1]);
    let expected = expected(&model, shape);
    for &lengths in lengths {
        MeshTest::new([lengths.len()], ["batch"]).run(|mesh| {
            for device in crate::parallel::support::devices(mesh) {
                for layout in [
                    Layout::new(mesh.shape(), &[S(0)])?,
                    Layout::new(mesh.shape(), &[S(0)])?.with_uneven_sizes(0, lengths.to_vec())?,
                ] {
                    let model = parallelize(on_device(&model, &device), mesh, Plan::new())?;
                    let what = || format!("{shape:?} as {layout}");
                    hold(&steps(&model, shape, &layout)?, &expected, what);
                }
            }
            Ok(())
        });
    }
}

/// A step of burn's layer by `sync_batch_norm`, of a replicated model and rows of each rank, with the
/// loss `(y * weights).sum()`.
fn synchronized<const D: usize>(
    model: &Only<BatchNorm>,
    mesh: &DeviceMesh,
    layout: &Layout,
    all: Tensor<D>,
    weights: Tensor<D>,
) -> Result<Step> {
    let shape = all.dims();
    let rows = DTensor::distribute_replicated_to(all, mesh, layout.clone())?;
    let x = rows.local().clone().detach().require_grad();
    // As a DTensor, because a rank may have no row.
    let rows = DTensor::from_local_with_layout(x.clone(), mesh, layout.clone(), shape)?;
    let y = unit(model, rows, |model, rows| {
        sync_batch_norm(&model.layer, rows.to_local(), mesh)
    })?;
    let weights = DTensor::distribute_replicated_to(weights, mesh, layout.clone())?;
    let grads = (y.clone() * weights.local().clone()).sum().backward();
    let full = |local| {
        let full = DTensor::from_local_with_layout(local, mesh, layout.clone(), shape)?;
        Ok::<_, Error>(floats(full.full_tensor()?))
    };
    let x = full(
        x.grad(&grads)
            .unwrap_or_else(|| x.clone().inner().zeros_like()),
    )?;
    let grads = values(model, Some(&GradientsParams::from_grads(grads, model)));
    // Averages over the ranks, each of its rows.
    let sum = |name: &str| {
        grads[name]
            .iter()
            .map(|grad| grad * mesh.size() as f32)
            .collect()
    };
    let [mean, variance] = running(&model.layer);
    Ok([
        full(y.inner())?,
        x,
        sum("layer.beta"),
        sum("layer.gamma"),
        mean,
        variance,
    ])
}

/// Replicates the layer, and returns it with the layout of rows of which each rank has `lengths`.
fn replicated(
    model: &Only<BatchNorm>,
    mesh: &DeviceMesh,
    lengths: &[usize],
) -> Result<(Only<BatchNorm>, Layout)> {
    let device = mesh.device().clone().autodiff();
    let config = DataParallel::new().with_layer_warnings(false);
    let model = replicate(on_device(model, &device), mesh, config)?;
    let even = Layout::new(mesh.shape(), &[S(0)])?;
    Ok((model, even.with_uneven_sizes(0, lengths.to_vec())?))
}

fn synchronized_rows<const D: usize>(shape: [usize; D], lengths: &[&[usize]]) {
    let model = layer(shape[1]);
    let expected = expected(&model, shape);
    for &lengths in lengths {
        MeshTest::new([lengths.len()], ["dp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let (model, layout) = replicated(&model, mesh, lengths)?;
            let weights = || tensor(99, shape, &device);
            let step = |step| {
                synchronized(
                    &model,
                    mesh,
                    &layout,
                    batch(step, shape, &device),
                    weights(),
                )
            };
            let found = (0..STEPS).map(step).collect::<Result<Vec<_>>>()?;
            hold(&found, &expected, || format!("{shape:?} as {layout}"));
            Ok(())
        });
    }
}

/// The case of `tests/golden/batch_norm.json` with `D` dimensions.
fn has_the_values_of_pytorch<const D: usize>(of: &[&[usize]]) {
    let text = include_str!("../../golden/batch_norm.json");
    let golden: Value = serde_json::from_str(text).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    let case = cases
        .iter()
        .find(|case| case["shape"].as_array().unwrap().len() == D);
    let case = case.expect("a case of this rank");
    let list = |name: &str| -> Vec<f32> { serde_json::from_value(case[name].clone()).unwrap() };
    let shape: Vec<usize> = serde_json::from_value(case["shape"].clone()).unwrap();
    let shape: [usize; D] = shape.try_into().expect("a case of this rank");
    let number = |name: &str| golden[name].as_f64().unwrap();
    // PyTorch's running variance has Bessel's correction, burn's has not.
    let count = (shape.iter().product::<usize>() / shape[1]) as f64;
    let kept = 1.0 - number("momentum");
    let uncorrected = |variance: f32| kept + (f64::from(variance) - kept) * (count - 1.0) / count;
    let variance = list("running_var")
        .into_iter()
        .map(|variance| uncorrected(variance) as f32);
    let [y, x, beta, gamma, mean] =
        ["y", "x_grad", "beta_grad", "gamma_grad", "running_mean"].map(list);
    let expected: [Step; 1] = [[y, x, beta, gamma, mean, variance.collect()]];
    let device = Device::flex();
    let tensor = |name: &str| Tensor::<1>::from_floats(list(name).as_slice(), &device);
    let mut layer = BatchNormConfig::new(shape[1])
        .with_momentum(number("momentum"))
        .with_epsilon(number("epsilon"))
        .init(&device);
    layer.gamma = layer.gamma.map(|_| tensor("gamma"));
    layer.beta = layer.beta.map(|_| tensor("beta"));
    let model = Only { layer };
    for &lengths in of {
        MeshTest::new([lengths.len()], ["dp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let tensor = |name: &str| {
                Tensor::<1>::from_floats(list(name).as_slice(), &device).reshape(shape)
            };
            let (model, layout) = replicated(&model, mesh, lengths)?;
            let found = synchronized(&model, mesh, &layout, tensor("x"), tensor("weights"))?;
            hold(&[found], &expected, || format!("{shape:?} as {layout}"));
            Ok(())
        });
    }
}

#[test]
fn synchronized_statistics_and_gradients_are_those_of_pytorch() {
    has_the_values_of_pytorch::<2>(&[&[7], &[5, 2], &[3, 0, 4], &[1, 2, 3, 1]]);
    has_the_values_of_pytorch::<3>(&[&[2, 2], &[1, 1, 2]]);
    has_the_values_of_pytorch::<4>(&[&[4, 1], &[2, 2, 1]]);
    has_the_values_of_pytorch::<5>(&[&[1, 2]]);
}

/// One call over burn's module: the variants of `SyncBatchNorm`, in a model that is replicated.
#[test]
fn burns_layer_normalizes_plain_rows_by_those_of_all_ranks() {
    synchronized_rows([7, 4], &[&[5, 2], &[1, 4, 2], &[3, 0, 4]]);
    synchronized_rows([5, 3, 2, 2], &[&[4, 1], &[2, 2, 1]]);
    synchronized_rows([4, 3, 5], &[&[1, 3]]);
    synchronized_rows([3, 2, 2, 1, 2], &[&[1, 2]]);
    synchronized_rows([2, 4], &[&[1, 1], &[1, 0, 1]]);
}

/// In half precision it has statistics of single precision, without training it is burn's forward,
/// and ranks of another group count for nothing.
#[test]
fn sync_batch_norm_of_half_precision_in_evaluation_and_of_a_group() {
    let model = layer(3);
    let device = Device::flex().autodiff();
    let rows = |rank: usize| batch(0, [8, 3], &device).narrow(0, 2 * rank, 2);
    let pair = |first: usize| {
        let model = on_device(&model, &device);
        let y = model
            .layer
            .forward(Tensor::cat(vec![rows(first), rows(first + 1)], 0));
        (floats(y.inner()), running(&model.layer))
    };
    let expected = [pair(0), pair(2)];
    MeshTest::new([2, 2], ["group", "dp"]).run(|mesh| {
        let (own, model) = (mesh.slice("dp")?, on_device(&model, &device));
        let (outputs, statistics) = &expected[mesh.rank() / 2];
        let at = 6 * (mesh.rank() % 2);
        let y = sync_batch_norm(&model.layer, rows(mesh.rank()), &own)?;
        near(&floats(y.inner()), &outputs[at..at + 6], || {
            "of a group".into()
        });
        for (found, expected) in running(&model.layer).iter().zip(statistics) {
            near(found, expected, || "statistics of a group".into());
        }
        // Statistics of 0.1 % would be rounded away in half precision.
        let half = on_device(&self::layer(3), &device);
        let x = rows(mesh.rank()).cast(DType::F16);
        let y = sync_batch_norm(&half.layer, x, &own)?;
        assert_eq!(y.dtype(), DType::F16);
        let y = floats(y.inner().cast(DType::F32));
        let far = y
            .iter()
            .zip(&outputs[at..at + 6])
            .map(|(a, b)| (a - b).abs());
        assert!(far.fold(0.0, f32::max) < 2e-2, "{y:?}");
        // Without training it is burn's own forward.
        let valid = model.valid();
        let x = rows(mesh.rank()).inner();
        let found = floats(sync_batch_norm(&valid.layer, x.clone(), &own)?);
        assert_eq!(found, floats(valid.layer.forward(x)));
        Ok(())
    });
}

/// As in a model of which other layers train: it is on the training device.
#[test]
fn sync_batch_norm_of_a_frozen_layer_is_burns_forward() {
    let model = layer(3);
    MeshTest::new([2], ["dp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let frozen = on_device(&model, &device).layer.freeze();
        let x = batch(mesh.rank() as u64, [4, 3], &device);
        let expected = floats(frozen.forward(x.clone()).inner());
        let y = sync_batch_norm(&frozen, x, mesh)?;
        assert_eq!(floats(y.inner()), expected);
        // Those of a new layer.
        assert_eq!(running(&frozen), [[0.0; 3], [1.0; 3]]);
        Ok(())
    });
}

/// `.._2D_Input`, `.._Diff_Input_Sizes_Running_Value`, `.._Diff_Input_Sizes_gradient`.
#[test]
fn statistics_are_those_of_all_rows_whatever_each_rank_has_of_them() {
    shared([7, 4], &[&[5, 2], &[1, 4, 2], &[3, 0, 4]]);
}

/// `test_DistributedDataParallel_SyncBatchNorm`: images, and signals and volumes.
#[test]
fn statistics_are_those_of_all_images() {
    shared([5, 3, 2, 2], &[&[4, 1], &[2, 2, 1]]);
    shared([4, 3, 5], &[&[1, 3]]);
    shared([3, 2, 2, 1, 2], &[&[1, 2]]);
}

/// `.._Single_Input_Per_Process`: alone it would have no variance. And less than one.
#[test]
fn a_rank_may_have_one_row_or_none() {
    shared([2, 4], &[&[1, 1], &[1, 0, 1]]);
}

/// Each rank normalizes channels of its own, whose statistics all ranks get.
#[test]
fn ranks_may_share_the_channels() {
    for shape in [[4, 6, 3], [4, 5, 2], [3, 1, 4]] {
        let model = layer(shape[1]);
        let expected = expected(&model, shape);
        MeshTest::new([3], ["tp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            for style in [R, S(0)] {
                for placement in [S(1), R, S(2)] {
                    let plan = Plan::new().with_style("layer", style);
                    let model = parallelize(on_device(&model, &device), mesh, plan)?;
                    let found = steps(&model, shape, &Layout::new(mesh.shape(), &[placement])?)?;
                    hold(&found, &expected, || {
                        format!("{shape:?}, parameters {style}, x {placement}")
                    });
                }
            }
            Ok(())
        });
    }
}

/// `test_SyncBatchNorm_process_group`: groups that see batches of their own.
#[test]
fn statistics_are_those_of_the_ranks_of_the_layers_mesh() {
    let model = layer(3);
    let (pair, four) = (expected(&model, [4, 3]), expected(&model, [5, 3]));
    MeshTest::new([2, 2], ["group", "batch"]).run(|mesh| {
        let (slice, device) = (mesh.slice("batch")?, mesh.device().clone().autodiff());
        let group = mesh.coordinate().expect("a member")[0];
        let model = parallelize(on_device(&model, &device), &slice, Plan::new())?;
        let layout = Layout::new(slice.shape(), &[S(0)])?;
        let (shape, expected) = [([4, 3], &pair), ([5, 3], &four)][group];
        hold(&steps(&model, shape, &layout)?, expected, || {
            format!("group {group}")
        });
        Ok(())
    });
}

/// `.._No_Affine`: burn's layer has `gamma` and `beta` always; frozen, they are 1 and 0 for good.
#[test]
fn without_training_gamma_and_beta_the_statistics_follow_all_the_same() {
    let shape = [5, 3];
    let mut model = Only {
        layer: BatchNormConfig::new(3).init(&Device::flex()),
    };
    let _ = values(&model, None); // Draw now, on one thread.
    model = model.no_grad();
    let expected = expected(&model, shape);
    assert!(
        expected[0][3].iter().all(|&gradient| gradient == 0.0),
        "they have no gradient"
    );
    MeshTest::new([2], ["batch"]).run(|mesh| {
        let model = parallelize(
            on_device(&model, &mesh.device().clone().autodiff()),
            mesh,
            Plan::new(),
        )?;
        hold(
            &steps(&model, shape, &Layout::new(mesh.shape(), &[S(0)])?)?,
            &expected,
            || "frozen".into(),
        );
        Ok(())
    });
}

/// `.._Channels_Last`: burn has no memory formats, but views of any strides.
#[test]
fn images_may_lie_channels_last() {
    let model = layer(3);
    let shape = [5, 2, 3, 3];
    let plain = |device: &Device| tensor::<4>(4, shape, device).permute([0, 3, 1, 2]);
    let expected = on_device(&model, &Device::flex().autodiff());
    let expected_y = floats(
        expected
            .layer
            .forward(plain(&Device::flex().autodiff()))
            .inner(),
    );
    let expected = running(&expected.layer);
    MeshTest::new([2], ["batch"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = parallelize(on_device(&model, &device), mesh, Plan::new())?;
        let x = DTensor::<4>::distribute_replicated(tensor(4, shape, &device), mesh, &[S(0)])?
            .permute([0, 3, 1, 2]);
        near(
            &floats(model.layer.forward_dtensor(x).full_tensor()?.inner()),
            &expected_y,
            || "output".into(),
        );
        for (found, expected) in running(&model.layer).iter().zip(&expected) {
            near(found, expected, || "running statistics".into());
        }
        Ok(())
    });
}

/// `.._half`: parameters of single precision, activations of half. Their squares would be infinite.
#[test]
fn half_precision_has_statistics_of_single_precision() {
    let model = layer(3);
    let shape = [6, 3, 4];
    for (dtype, precision) in [(DType::F16, 1e-3), (DType::BF16, 8e-3)] {
        let large = |device: &Device| (batch::<3>(0, shape, device) * 300.0).cast(dtype);
        let device = Device::flex().autodiff();
        let single = on_device(&model, &device);
        let x = large(&device).cast(DType::F32).require_grad();
        let y = single.layer.forward(x.clone());
        let grads = loss(y.clone()).backward();
        let (y, x) = (
            floats(y.inner()),
            floats(x.grad(&grads).expect("in the loss")),
        );
        let scale = x
            .iter()
            .fold(0.0f32, |scale, gradient| scale.max(gradient.abs()));
        let grads = values(&single, Some(&GradientsParams::from_grads(grads, &single)));
        let statistics = running(&single.layer);
        MeshTest::new([2], ["batch"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = parallelize(on_device(&model, &device), mesh, Plan::new())?;
            // Gradients near the smallest numbers of half precision would be rounded away.
            let input =
                DTensor::distribute_replicated(large(&device), mesh, &[S(0)])?.require_grad();
            let leaf = input.local().clone();
            let output = model.layer.forward_dtensor(input);
            assert_eq!(output.dtype(), dtype);
            let output = output.full_tensor()?.cast(DType::F32);
            let backward = (loss(output.clone()) * 1024.0).backward();
            let within = |found: &[f32], expected: &[f32], scale: f32, what: &str| {
                let furthest = found
                    .iter()
                    .zip(expected)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f32::max);
                assert!(
                    furthest <= precision * scale,
                    "{dtype:?}: {what} is {furthest} off, of {scale}"
                );
            };
            within(&floats(output.inner()), &y, 4.0, "the output");
            let gradient = leaf.grad(&backward).expect("in the loss");
            assert_eq!(gradient.dtype(), dtype);
            let gradient =
                DTensor::from_local_with_shape(gradient.cast(DType::F32), mesh, &[S(0)], shape)?;
            within(
                &floats(gradient.full_tensor()? / 1024.0),
                &x,
                scale,
                "the input's gradient",
            );
            let found = full_grads(&model, &GradientsParams::from_grads(backward, &model))?;
            for (path, expected) in &grads {
                let found: Vec<f32> = found[path]
                    .iter()
                    .map(|gradient| gradient / 1024.0)
                    .collect();
                within(&found, expected, 8.0, path);
            }
            for (found, expected) in running(&model.layer).iter().zip(&statistics) {
                near(found, expected, || format!("{dtype:?}: running statistics"));
            }
            // What runs on them in validation is of half precision, too.
            let x = DTensor::distribute_replicated(large(mesh.device()), mesh, &[S(0)])?;
            assert_eq!(model.valid().layer.forward_dtensor(x).dtype(), dtype);
            Ok(())
        });
    }
}

/// Validation, and a layer that is frozen on the training device.
#[test]
fn outside_of_training_the_running_statistics_normalize() {
    let (model, shape) = (layer(4), [5, 4, 2]);
    let device = Device::flex().autodiff();
    let trained = on_device(&model, &device);
    trained.layer.forward(batch(0, shape, &device));
    let x = batch(1, shape, &Device::flex());
    let expected = floats(trained.valid().layer.forward(x.clone()));
    MeshTest::new([3], ["batch"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        for (placement, style) in [(S(0), R), (S(1), R), (S(1), S(0)), (R, S(0))] {
            let plan = Plan::new().with_style("layer", style);
            let model = parallelize(on_device(&model, &device), mesh, plan)?;
            model.layer.forward_dtensor(DTensor::distribute_replicated(
                batch(0, shape, &device),
                mesh,
                &[placement],
            )?);
            let before = running(&model.layer);
            let what = || format!("x {placement}, parameters {style}");
            let valid = model.valid();
            let y = valid.layer.forward_dtensor(DTensor::distribute_replicated(
                x.clone(),
                mesh,
                &[placement],
            )?);
            near(&floats(y.full_tensor()?), &expected, what);
            let frozen = model.clone().freeze();
            let y = frozen.layer.forward_dtensor(DTensor::distribute_replicated(
                batch(1, shape, &device),
                mesh,
                &[placement],
            )?);
            near(&floats(y.full_tensor()?.inner()), &expected, what);
            assert_eq!(
                running(&model.layer),
                before,
                "what is frozen follows no batch"
            );
        }
        Ok(())
    });
}

/// The gathered model is an ordinary one.
#[test]
fn the_gathered_layer_has_the_statistics_of_the_full_batch() {
    let (model, shape) = (layer(3), [5, 3]);
    let expected = expected(&model, shape).pop().expect("a step");
    MeshTest::new([2], ["batch"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = parallelize(on_device(&model, &device), mesh, Plan::new())?;
        steps(&model, shape, &Layout::new(mesh.shape(), &[S(0)])?)?;
        let full = full_model(&model)?.valid();
        near(
            &floats(full.layer.running_mean.value()),
            &expected[4],
            || "running mean".into(),
        );
        near(
            &floats(full.layer.running_var.value()),
            &expected[5],
            || "running variance".into(),
        );
        Ok(())
    });
}

/// A mean and a variance each way, and what the unit adds up.
#[test]
fn a_shared_batch_sends_two_numbers_a_channel_each_way() {
    let (model, shape) = (layer(3), [6, 3, 4]);
    MeshTest::new([2], ["batch"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = parallelize(on_device(&model, &device), mesh, Plan::new())?;
        let x =
            DTensor::distribute_replicated(batch(0, shape, &device), mesh, &[S(0)])?.require_grad();
        let ledger = mesh.world().ledger();
        ledger.reset();
        let y = RedistributePolicy::Deny
            .run(|| unit(&model, x, |model, x| model.layer.forward_dtensor(x)));
        assert_eq!(y.placements(), [S(0)]);
        loss(y.to_local()).backward();
        let counts: Vec<_> = ledger
            .by_phase()
            .into_iter()
            .map(|((op, phase), total)| (op, phase, total.calls))
            .collect();
        assert_eq!(
            counts,
            [
                (Op::AllReduce, Phase::Forward, 2),
                (Op::AllReduce, Phase::Backward, 3)
            ]
        );
        Ok(())
    });
}

#[test]
fn an_input_of_other_channels_is_a_typed_error() {
    let model = layer(3);
    MeshTest::new([2], ["batch"]).run(|mesh| {
        for device in [mesh.device().clone(), mesh.device().clone().autodiff()] {
            let model = parallelize(on_device(&model, &device), mesh, Plan::new())?;
            let x = DTensor::<2>::ones([4, 5], mesh, &[S(0)], &device)?;
            let error = refused(|| model.layer.forward_dtensor(x));
            assert!(
                matches!(error, Error::DTensor(DTensorError::Operands { .. })),
                "{error}"
            );
        }
        Ok(())
    });
}
