//! `clip_grad_norm` of odd gradients.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{
    ClipGradNorm, FsdpError, FullyShard, GradScaler, NormType, ParamExt, ParamInfo, clip_grad_norm,
    fully_shard,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::optim::sharded;
use burn_dtensor::placement::Placement;
use burn_dtensor::testing::MeshTest;

use super::support::tensor;
use crate::launched;

fn only(value: f64, dtype: DType, device: &Device) -> Linear {
    let mut linear = LinearConfig::new(4, 4).with_bias(false).init(device);
    let weight = Tensor::<2>::full([4, 4], value, (device, dtype)).require_grad();
    linear.weight = Param::initialized(linear.weight.id, weight);
    linear
}

/// Every element of a weight of 16 gets its own value as its gradient.
fn clipped(value: f64, dtype: DType, max_norm: f64) -> Vec<(f64, Vec<f64>)> {
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let model = fully_shard(only(value, dtype, &device), &mesh, FullyShard::new())?;
        let weight = model.weight.val();
        let loss = (weight.clone() * weight).sum() / 2.0;
        let mut grads = GradientsParams::from_grads(loss.backward(), &model);
        let norm = clip_grad_norm(&model, &mut grads, max_norm, NormType::L2)?;
        let grad = grads.get::<2>(model.weight.id).expect("a gradient");
        Ok((norm, grad.into_data().iter::<f64>().collect()))
    })
    .map(launched::values)
    .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_norm_that_is_no_number_makes_no_gradient_one() {
    for (norm, grad) in clipped(f64::NAN, DType::F32, 1.0) {
        assert!(
            norm.is_nan() && grad.iter().all(|element| element.is_nan()),
            "{norm} {grad:?}"
        );
    }
    // Of one element on one rank too.
    let all = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let model = fully_shard(only(1.0, DType::F32, &device), &mesh, FullyShard::new())?;
        let odd = Tensor::<2>::from_data([[f32::NAN, 1.0, 1.0, 1.0]], &device);
        let factor = Tensor::cat(vec![odd, Tensor::ones([3, 4], &device)], 0);
        let loss = (model.weight.val() * factor).sum();
        let mut grads = GradientsParams::from_grads(loss.backward(), &model);
        let norm = clip_grad_norm(&model, &mut grads, f64::MAX, NormType::Inf)?;
        let grad = grads.get::<2>(model.weight.id).expect("a gradient");
        Ok(norm.is_nan() && grad.into_data().iter::<f64>().all(f64::is_nan))
    });
    assert_eq!(
        all.unwrap_or_else(|error| panic!("{error}")),
        [(0, true), (1, true)]
    );
}

/// Beyond the range of single precision, and below its resolution.
#[test]
fn double_precision_gradients_have_a_norm_of_double_precision() {
    for value in [1e25, 1.0 + 1e-12] {
        for (norm, grad) in clipped(value, DType::F64, 1.0) {
            assert!(
                (norm / (4.0 * value) - 1.0).abs() < 1e-14,
                "{norm:e} for {:e}",
                4.0 * value
            );
            assert!(
                grad.iter().all(|element| (element - 0.25).abs() < 1e-6),
                "{grad:?}"
            );
        }
    }
}

#[derive(Module, Debug)]
struct Pair {
    student: Linear,
    teacher: Linear,
}

/// A clone's parameters have the ids of the original's: there is one gradient for both.
#[test]
fn a_clone_in_the_model_is_not_counted_or_scaled_again() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let student = fully_shard(only(2.0, DType::F32, &device), mesh, FullyShard::new())?;
        let loss = || student.weight.val().square().sum();
        let pair = Pair {
            teacher: student.clone().no_grad(),
            student: student.clone(),
        };
        let adam = AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)));
        let grad = |grads: &GradientsParams| {
            grads
                .get::<2>(student.weight.id)
                .expect("a gradient")
                .into_data()
        };

        let mut grads = GradientsParams::from_grads(loss().backward(), &student);
        let mut of_pair = GradientsParams::from_grads(loss().backward(), &pair);
        let norm = clip_grad_norm(&student, &mut grads, 1.0, NormType::L2)?;
        assert_eq!(
            clip_grad_norm(&pair, &mut of_pair, 1.0, NormType::L2)?,
            norm
        );
        assert_eq!(grad(&of_pair), grad(&grads));

        let mut grads = GradientsParams::from_grads((loss() * 8.0).backward(), &pair);
        assert!(
            GradScaler::new()
                .with_init_scale(8.0)
                .unscale(&pair, &mut grads)?
        );
        assert_eq!(
            grad(&grads),
            grad(&GradientsParams::from_grads(loss().backward(), &student))
        );

        let of_pair = GradientsParams::from_grads(loss().backward(), &pair);
        let stepped = sharded(adam.clone())
            .step(0.1, pair.clone(), of_pair)?
            .student;
        let grads = GradientsParams::from_grads(loss().backward(), &student);
        let alone = sharded(adam).step(0.1, student.clone(), grads)?;
        assert_eq!(
            stepped.weight.base().into_data(),
            alone.weight.base().into_data()
        );
        Ok(())
    });
}

/// Elements of a gradient of this shape, the same on every rank.
fn full(seed: u64, shape: [usize; 2], (device, dtype): (&Device, DType)) -> Tensor<2> {
    tensor::<2>(seed, shape, device)
        .cast(DType::F64)
        .mul_scalar(3.0)
        .cast(dtype)
}

/// Norms of a model whose layers have these types, from given gradients; the same from all elements
/// in double precision; and the clipped gradients' norm.
fn norms(ranks: usize, dtypes: &[DType], norm: NormType) -> Vec<[f64; 3]> {
    MeshTest::new([ranks], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let layers: Vec<_> = dtypes.iter().map(|&dtype| wide(dtype, &device)).collect();
        let model = fully_shard(layers, mesh, FullyShard::new())?;
        let (mut grads, mut elements) = (GradientsParams::new(), Vec::new());
        for (seed, (layer, &dtype)) in (1..).zip(model.iter().zip(dtypes)) {
            let grad = full(seed, WIDE, (mesh.device(), dtype));
            elements.extend(grad.clone().into_data().iter::<f64>());
            let rows = layer
                .weight
                .shard()
                .expect("it is sharded")
                .spec()
                .local_range(0);
            grads.register(layer.weight.id, grad.slice([rows]));
        }
        let measured = clip_grad_norm(&model, &mut grads, f64::MAX, norm)?;
        let before = grads.get::<2>(model[0].weight.id).expect("a gradient");
        clip_grad_norm(&model, &mut grads, measured / 8.0, norm)?;
        let after = grads.get::<2>(model[0].weight.id).expect("a gradient");
        assert_eq!(after.dtype(), dtypes[0]);
        let largest = |grad: Tensor<2>| {
            grad.into_data()
                .iter::<f64>()
                .fold(0.0, |a: f64, b| a.max(b.abs()))
        };
        let magnitudes = elements.iter().map(|element| element.abs());
        let expected = match norm {
            NormType::P(0.0) => magnitudes.filter(|&element| element != 0.0).count() as f64,
            NormType::P(p) => magnitudes
                .map(|element| element.powf(p))
                .sum::<f64>()
                .powf(1.0 / p),
            NormType::Inf => magnitudes.fold(0.0, f64::max),
        };
        Ok([measured, expected, largest(before) / largest(after)])
    })
}

/// Sums of a half-precision gradient's elements lose it all: 2 ^ 13 elements of about 1 are far
/// beyond the 2 ^ 8 up to which bf16 counts.
const WIDE: [usize; 2] = [129, 64];

fn wide(dtype: DType, device: &Device) -> Linear {
    let mut linear = LinearConfig::new(WIDE[0], WIDE[1])
        .with_bias(false)
        .init(device);
    let weight = Tensor::<2>::ones(WIDE, (device, dtype)).require_grad();
    linear.weight = Param::initialized(linear.weight.id, weight);
    linear
}

/// Against the unsharded norm in double precision, on two ranks and on three with shards of unequal
/// lengths.
#[test]
fn a_norm_is_as_precise_as_its_gradients_or_single_precision() {
    let single = [DType::F32, DType::BF16, DType::F16];
    let mixed = [DType::F64, DType::F32, DType::BF16, DType::F16];
    let models: Vec<(&[DType], f64)> = single.chunks(1).map(|only| (only, 1e-6)).collect();
    for (dtypes, bound) in models
        .into_iter()
        .chain([(&[DType::F64][..], 1e-14), (&mixed[..], 1e-6)])
    {
        for norm in [
            NormType::L1,
            NormType::L2,
            NormType::P(3.0),
            NormType::P(0.0),
            NormType::Inf,
        ] {
            for ranks in [2, 3] {
                for [measured, expected, scaled] in norms(ranks, dtypes, norm) {
                    let apart = (measured / expected - 1.0).abs();
                    assert!(
                        apart < bound,
                        "{norm:?} of {dtypes:?} on {ranks} ranks: {measured}, not {expected}"
                    );
                    assert!(
                        (scaled / 8.0 - 1.0).abs() < 0.02,
                        "{norm:?} of {dtypes:?}: scaled by {scaled}"
                    );
                }
            }
        }
    }
}

const P_NORMS: [NormType; 9] = [
    NormType::L1,
    NormType::L2,
    NormType::P(0.5),
    NormType::P(3.0),
    NormType::P(10.0),
    NormType::P(200.0),
    NormType::P(-1.0),
    NormType::P(-3.0),
    NormType::Inf,
];

/// Computes the norm in double precision, of elements divided by the one that counts most.
fn by_hand(elements: &[f64], norm: NormType) -> f64 {
    let magnitudes = || elements.iter().map(|element| element.abs());
    let largest = magnitudes().fold(0.0, f64::max);
    let NormType::P(p) = norm else { return largest };
    let most = if p < 0.0 {
        magnitudes().fold(f64::INFINITY, f64::min)
    } else {
        largest
    };
    most * magnitudes()
        .map(|element| (element / most).powf(p))
        .sum::<f64>()
        .powf(1.0 / p)
}

/// Returns, of each rank, the norm of a model whose three layers have gradients of about these
/// magnitudes, and the elements of all gradients. The last layer is replicated; one of its elements
/// is `spoil`.
fn norms_of(
    mesh: &MeshTest,
    like: [f64; 3],
    dtype: DType,
    norm: NormType,
    spoil: Option<f64>,
) -> Vec<(f64, Vec<f64>)> {
    mesh.run(|mesh| {
        let layers: Vec<_> = like
            .iter()
            .map(|_| only(1.0, dtype, &mesh.device().clone().autodiff()))
            .collect();
        let full = |param: ParamInfo| param.path.starts_with('2').then_some(Placement::Replicate);
        let model = fully_shard(
            layers,
            mesh,
            FullyShard::new().with_shard_placement_fn(full),
        )?;
        let (mut grads, mut elements) = (GradientsParams::new(), Vec::new());
        for (at, (layer, value)) in model.iter().zip(like).enumerate() {
            let mut grad: Vec<f64> = (0..16)
                .map(|k| value * (1.0 + f64::from(k) / 16.0))
                .collect();
            if let Some(odd) = spoil.filter(|_| at == 2) {
                grad[5] = odd;
            }
            let grad =
                Tensor::<1>::from_data(grad.as_slice(), (mesh.device(), dtype)).reshape([4, 4]);
            elements.extend(grad.clone().into_data().iter::<f64>());
            let spec = layer.weight.shard().expect("it is sharded").spec().clone();
            grads.register(layer.weight.id, grad.slice([spec.local_range(0)]));
        }
        Ok((
            clip_grad_norm(&model, &mut grads, f64::MAX, norm)?,
            elements,
        ))
    })
}

fn meshes() -> [MeshTest; 3] {
    [
        MeshTest::new([2], ["shard"]),
        MeshTest::new([3], ["shard"]),
        MeshTest::new([2, 2], ["replicate", "shard"]),
    ]
}

/// The squares of these exceed the range of single precision, and some powers that of double
/// precision.
#[test]
fn the_norm_of_very_large_or_very_small_gradients_is_right() {
    let large_and_small = [
        [1e30; 3],
        [1e-30; 3],
        [1e20; 3],
        [1e-25; 3],
        [1e30, 1.0, 1e-30],
        [1.0, 1e-30, 1e30],
    ];
    for (mesh, like) in meshes()
        .iter()
        .flat_map(|mesh| large_and_small.map(|like| (mesh, like)))
    {
        for norm in P_NORMS {
            for (measured, elements) in norms_of(mesh, like, DType::F32, norm, None) {
                let expected = by_hand(&elements, norm);
                assert!(
                    (measured / expected - 1.0).abs() < 2e-6,
                    "{norm:?} of {like:?}: {measured:e}, not {expected:e}"
                );
            }
        }
    }
    for like in [[1e200; 3], [1e-200; 3], [1e200, 1.0, 1e-200]] {
        for norm in [NormType::L1, NormType::L2, NormType::P(3.0), NormType::Inf] {
            for (measured, elements) in norms_of(&meshes()[0], like, DType::F64, norm, None) {
                let expected = by_hand(&elements, norm);
                assert!(
                    (measured / expected - 1.0).abs() < 1e-13,
                    "{norm:?} of {like:?}: {measured:e}, not {expected:e}"
                );
            }
        }
    }
}

#[test]
fn very_large_gradients_are_scaled_and_not_made_zero() {
    for (norm, grad) in clipped(1e20, DType::F32, 1.0) {
        assert!((norm / 4e20 - 1.0).abs() < 1e-6, "{norm:e}");
        assert!(
            grad.iter().all(|element| (element - 0.25).abs() < 1e-6),
            "{grad:?}"
        );
    }
    for (norm, grad) in clipped(1e-25, DType::F32, 1.0) {
        assert!((norm / 4e-25 - 1.0).abs() < 1e-6, "{norm:e}");
        assert!(
            grad.iter().all(|element| *element == f64::from(1e-25f32)),
            "{grad:?}"
        );
    }
}

#[test]
fn a_gradient_that_is_infinite_or_no_number_still_is() {
    let positive = P_NORMS
        .into_iter()
        .filter(|norm| !matches!(norm, NormType::P(p) if *p < 0.0));
    for (norm, like) in positive.flat_map(|norm| [1e30, 1.0, 1e-30].map(|like| (norm, like))) {
        for mesh in &meshes()[..2] {
            let infinite = norms_of(mesh, [like; 3], DType::F32, norm, Some(f64::NEG_INFINITY));
            assert!(
                infinite
                    .iter()
                    .all(|(measured, _)| *measured == f64::INFINITY),
                "{norm:?}: {infinite:?}"
            );
            let odd = norms_of(mesh, [like; 3], DType::F32, norm, Some(f64::NAN));
            assert!(
                odd.iter().all(|(measured, _)| measured.is_nan()),
                "{norm:?}: {odd:?}"
            );
        }
    }
}

/// The expected value is the sum of each rank's unscaled sums of powers, in the gradients'
/// precision.
#[test]
fn an_ordinary_norm_is_that_without_scaling_to_the_bit() {
    for (p, dtype) in [1.0, 2.0, 3.0]
        .into_iter()
        .flat_map(|p| [DType::F32, DType::F64].map(|dtype| (p, dtype)))
    {
        let ranks = MeshTest::new([2], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = vec![wide(dtype, &device), wide(dtype, &device)];
            let model = fully_shard(model, mesh, FullyShard::new())?;
            let (mut grads, mut sum) = (GradientsParams::new(), 0.0);
            for (seed, layer) in (1..).zip(&model) {
                let rows = layer
                    .weight
                    .shard()
                    .expect("it is sharded")
                    .spec()
                    .local_range(0);
                let grad = full(seed, WIDE, (mesh.device(), dtype)).slice([rows]);
                let magnitude = grad.clone().abs();
                let powers = match p {
                    1.0 => magnitude,
                    2.0 => magnitude.clone() * magnitude,
                    _ => magnitude.powf_scalar(p),
                };
                sum += powers.sum().into_scalar::<f64>();
                grads.register(layer.weight.id, grad);
            }
            Ok((
                clip_grad_norm(&model, &mut grads, f64::MAX, NormType::P(p))?,
                sum,
            ))
        });
        let [(_, first), (_, second)] = ranks[..] else {
            unreachable!("two ranks")
        };
        let sum = match dtype {
            DType::F64 => first + second,
            _ => f64::from(first as f32 + second as f32),
        };
        for (measured, _) in &ranks {
            assert_eq!(
                measured.to_bits(),
                sum.powf(1.0 / p).to_bits(),
                "{dtype:?}, p = {p}"
            );
        }
    }
}

/// All ranks get the error if one of them has such a gradient, and gradients stay as they were.
#[test]
fn a_norm_that_is_not_finite_is_an_error_on_request() {
    for odd in [f32::NAN, f32::INFINITY] {
        MeshTest::new([2], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = fully_shard(only(1.0, DType::F32, &device), mesh, FullyShard::new())?;
            let odd = Tensor::<2>::from_data([[odd, 1.0, 1.0, 1.0]], &device);
            let factor = Tensor::cat(vec![odd, Tensor::ones([3, 4], &device)], 0);
            let mut grads =
                GradientsParams::from_grads((model.weight.val() * factor).sum().backward(), &model);
            let grad = |grads: &GradientsParams| {
                grads
                    .get::<2>(model.weight.id)
                    .expect("a gradient")
                    .into_data()
            };
            let before = grad(&grads);
            let error = ClipGradNorm::new(0.1)
                .with_error_if_nonfinite(true)
                .clip(&model, &mut grads)
                .unwrap_err();
            let Error::Fsdp(FsdpError::NonFiniteNorm {
                norm,
                max_norm,
                param,
            }) = &error
            else {
                panic!("{error}")
            };
            assert!(!norm.is_finite() && *max_norm == 0.1);
            assert_eq!(param.as_deref(), (mesh.rank() == 0).then_some("weight"));
            assert_eq!(format!("{before:?}"), format!("{:?}", grad(&grads)));
            let clipped = ClipGradNorm::new(0.1)
                .with_norm_type(NormType::L1)
                .clip(&model, &mut grads)?;
            assert!(!clipped.is_finite(), "the default");
            Ok(())
        });
    }
}
