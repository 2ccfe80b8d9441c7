//! `GradScaler`, held to what PyTorch documents of its own.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::{Op, ReduceOp};
use burn_dtensor::fsdp::{
    FullyShard, GradScaler, MixedPrecisionPolicy, ParamExt, full_model, fully_shard,
    named_parameters, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::support::{max_diff, on_device, tensor, values};

const WIDTH: usize = 4;

fn layer(device: &Device) -> Linear {
    device.seed(1);
    LinearConfig::new(WIDTH, 3).init(device)
}

/// Gradients of the model's shards: `value` everywhere but in the last element of each, which is
/// `odd` if that is given.
fn grads(model: &impl Module, value: f32, odd: Option<f32>) -> GradientsParams {
    let mut grads = GradientsParams::new();
    for param in named_parameters(model).expect("it is sharded") {
        let shape = param.spec.local_shape().to_vec();
        let mut numbers = vec![value; shape.iter().product()];
        if let (Some(odd), Some(last)) = (odd, numbers.last_mut()) {
            *last = odd;
        }
        let data = TensorData::new(numbers, shape.clone());
        match shape.len() {
            1 => grads.register(param.id, Tensor::<1>::from_data(data, &Device::flex())),
            _ => grads.register(param.id, Tensor::<2>::from_data(data, &Device::flex())),
        }
    }
    grads
}

/// A layer of whose weight the last of three ranks holds no part.
fn on_three(body: impl Fn(&DeviceMesh, &Linear) + Sync) {
    let plain = layer(&Device::flex());
    let _ = values(&plain, None);
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let layer = fully_shard(plain.clone(), mesh, FullyShard::new())?;
        body(mesh, &layer);
        Ok(())
    });
}

/// Its default configuration: 65536, which 2000 good steps double and one bad step halves.
#[test]
fn the_scale_grows_after_2000_good_steps_and_shrinks_at_a_bad_one() {
    on_three(|_, layer| {
        let mut scaler = GradScaler::new();
        assert_eq!(scaler.current_scale(), 65536.0);
        let mut step = |odd| {
            let is_finite = scaler
                .unscale(layer, &mut grads(layer, 65536.0, odd))
                .unwrap();
            scaler.update().unwrap();
            (is_finite, scaler.current_scale())
        };
        assert_eq!(step(None), (true, 65536.0));
        // It counts anew after a bad step.
        assert_eq!(step(Some(f32::INFINITY)), (false, 32768.0));
        for _ in 0..1999 {
            assert_eq!(step(None), (true, 32768.0));
        }
        assert_eq!(step(None), (true, 65536.0));
        assert_eq!(step(Some(f32::NAN)), (false, 32768.0));
        assert_eq!(step(Some(f32::NEG_INFINITY)), (false, 16384.0));
    });
}

#[test]
fn factors_and_interval_may_be_set_and_an_infinite_scale_is_none() {
    on_three(|_, layer| {
        let scaler = GradScaler::new()
            .with_init_scale(8.0)
            .with_growth_factor(4.0)
            .with_backoff_factor(0.25)
            .with_growth_interval(2);
        let scales = |mut scaler: GradScaler, odd: &[bool]| -> Vec<f32> {
            let mut scale = |&odd: &bool| {
                scaler
                    .unscale(layer, &mut grads(layer, 1.0, odd.then_some(f32::NAN)))
                    .unwrap();
                scaler.update().unwrap();
                scaler.current_scale()
            };
            odd.iter().map(&mut scale).collect()
        };
        assert_eq!(
            scales(scaler.clone(), &[false, true, false, false, false, false]),
            [8.0, 2.0, 2.0, 8.0, 8.0, 32.0]
        );
        assert_eq!(
            scales(scaler.with_init_scale(f32::MAX), &[false; 3]),
            [f32::MAX; 3]
        );
    });
}

/// A scale of 0 would hide every overflow, and one below the normal numbers may count as 0.
#[test]
fn the_scale_does_not_shrink_below_the_smallest_normal_number() {
    on_three(|_, layer| {
        let mut scaler = GradScaler::new().with_init_scale(2.0 * f32::MIN_POSITIVE);
        for _ in 0..2 {
            let mut grads = grads(layer, 1.0, Some(f32::INFINITY));
            assert!(!scaler.unscale(layer, &mut grads).unwrap());
            scaler.update().unwrap();
            assert_eq!(scaler.current_scale(), f32::MIN_POSITIVE);
        }
    });
}

#[test]
fn one_rank_that_overflows_has_all_skip_the_step() {
    on_three(|mesh, layer| {
        for (odd_rank, odd) in [(0, f32::INFINITY), (1, f32::NAN), (2, f32::NEG_INFINITY)] {
            let mut scaler = GradScaler::new();
            let own = (mesh.rank() == odd_rank).then_some(odd);
            mesh.world().ledger().reset();
            let mut grads = grads(layer, 1.0, own);
            assert!(
                !scaler.unscale(layer, &mut grads).unwrap(),
                "{odd} on rank {odd_rank}"
            );
            scaler
                .step(layer.clone(), grads, |_, _| {
                    panic!("a step that overflowed")
                })
                .unwrap();
            scaler.update().unwrap();
            assert_eq!(mesh.world().ledger().calls(Op::AllReduce), 1);
            let scales = mesh
                .all_reduce(scaler.current_scale(), ReduceOp::Max)
                .unwrap();
            assert_eq!([scales, scaler.current_scale()], [32768.0; 2]);
        }
        // A rank without gradients takes part.
        let mut own = if mesh.rank() == 1 {
            GradientsParams::new()
        } else {
            grads(layer, 1.0, None)
        };
        assert!(GradScaler::new().unscale(layer, &mut own).unwrap());
    });
}

/// A layer on two ranks, and one on all four.
#[test]
fn one_rank_that_overflows_has_all_ranks_of_all_meshes_skip_the_step() {
    MeshTest::new([2, 2], ["outer", "inner"]).run(|mesh| {
        let config = FullyShard::new().with_shard_dims(["outer", "inner"]);
        let small = layer(mesh.device());
        let small: Linear = fully_shard(small, &mesh.slice("inner")?, FullyShard::new())?;
        let model = vec![small, fully_shard(layer(mesh.device()), mesh, config)?];
        for odd_rank in 0..4 {
            let mut scaler = GradScaler::new();
            let own = (mesh.rank() == odd_rank).then_some(f32::INFINITY);
            let is_finite = scaler.unscale(&model, &mut grads(&model, 1.0, own))?;
            assert!(!is_finite, "rank {odd_rank} has overflowed");
            scaler.update()?;
            assert_eq!(scaler.current_scale(), 32768.0);
        }
        Ok(())
    });
}

/// As PyTorch's, it does not take calls out of order; each model has a state of its own.
#[test]
fn calls_out_of_order_are_refused_and_two_models_share_a_scale() {
    on_three(|mesh, layer| {
        let other = fully_shard(self::layer(mesh.device()), mesh, FullyShard::new()).unwrap();
        let mut scaler = GradScaler::new();
        let is = |result: Result<()>, text: &str| {
            assert!(result.unwrap_err().to_string().contains(text), "{text}");
        };
        is(scaler.update(), "no gradients were unscaled");
        let mut own = grads(layer, 1.0, None);
        scaler.unscale(layer, &mut own).unwrap();
        is(
            scaler.unscale(layer, &mut own).map(drop),
            "`GradScaler::unscale` was called twice",
        );
        let overflowed = grads(&other, 1.0, Some(f32::INFINITY));
        scaler
            .step(other.clone(), overflowed, |_, _| {
                panic!("a step that overflowed")
            })
            .unwrap();
        let mut is_stepped = false;
        scaler
            .step(layer.clone(), own, |layer, _| {
                is_stepped = true;
                Ok(layer)
            })
            .unwrap();
        assert!(
            is_stepped,
            "the other model's gradients had overflowed, not these"
        );
        let again = scaler.step(layer.clone(), GradientsParams::new(), |layer, _| Ok(layer));
        is(again.map(drop), "`GradScaler::step` was called twice");
        scaler.update().unwrap();
        assert_eq!(scaler.current_scale(), 32768.0);
    });
}

/// Models that are not sharded are told apart, too.
#[test]
fn two_models_of_one_device_share_a_scale() {
    let device = Device::flex();
    let mut scaler = GradScaler::new().with_growth_interval(1);
    for layer in [layer(&device), layer(&device)] {
        assert!(scaler.unscale(&layer, &mut GradientsParams::new()).unwrap());
        scaler
            .step(layer, GradientsParams::new(), |layer, _| Ok(layer))
            .unwrap();
    }
    scaler.update().unwrap();
    assert_eq!(scaler.current_scale(), 2.0 * 65536.0);
}

#[test]
fn good_gradients_are_unscaled() {
    on_three(|_, layer| {
        let mut grads = grads(layer, 3.0, None);
        assert!(
            GradScaler::new()
                .with_init_scale(8.0)
                .unscale(layer, &mut grads)
                .unwrap()
        );
        let grad = layer
            .weight
            .shard_grad(&grads)
            .expect("a gradient")
            .local()
            .clone();
        assert_eq!(grad.clone().into_data(), grad.full_like(0.375).into_data());
    });
}

#[test]
fn its_state_is_saved_and_loaded() {
    on_three(|_, layer| {
        let mut scaler = GradScaler::new().with_growth_interval(3);
        let step = |scaler: &mut GradScaler| {
            scaler
                .step(layer.clone(), grads(layer, 1.0, None), |layer, _| Ok(layer))
                .unwrap();
            scaler.update().unwrap();
        };
        step(&mut scaler);
        step(&mut scaler);
        let mut loaded: GradScaler =
            serde_json::from_str(&serde_json::to_string(&scaler).unwrap()).unwrap();
        assert_eq!(loaded, scaler);
        step(&mut loaded);
        assert_eq!(loaded.current_scale(), 2.0 * scaler.current_scale());
    });
}

/// Runs `body` on two ranks, with a layer that computes in `f16`.
fn in_half_precision(body: impl Fn(&DeviceMesh, Linear) -> Result<()> + Sync) {
    let plain = layer(&Device::flex());
    let _ = values(&plain, None);
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let half = MixedPrecisionPolicy::new()
            .with_param_dtype(DType::F16)
            .with_reduce_dtype(DType::F32)
            .with_output_dtype(DType::F32);
        let config = FullyShard::new().with_mixed_precision(half);
        body(mesh, fully_shard(on_device(&plain, &device), mesh, config)?)
    });
}

/// In `f16` the loss's gradient alone, of 2 ^ -26, would be 0.
#[test]
fn small_gradients_of_half_precision_survive() {
    in_half_precision(|mesh, sharded| {
        let device = mesh.device().clone().autodiff();
        let loss = || {
            let x = tensor::<2>(1, [2, WIDTH], &device);
            unit(&sharded, x, |layer, x| layer.forward(x)).sum() * 2f32.powi(-26)
        };
        let largest = |grads: &GradientsParams| {
            let grad = sharded
                .weight
                .full_grad(grads)
                .unwrap()
                .expect("a gradient");
            grad.abs().max().into_scalar::<f32>()
        };
        let unscaled = GradientsParams::from_grads(loss().backward(), &sharded);
        assert_eq!(largest(&unscaled), 0.0);
        let mut scaler = GradScaler::new();
        let mut grads = GradientsParams::from_grads(scaler.scale(loss()).backward(), &sharded);
        assert!(scaler.unscale(&sharded, &mut grads)?);
        let expected = tensor::<2>(1, [2, WIDTH], &device)
            .sum_dim(0)
            .abs()
            .max()
            .into_scalar::<f32>()
            * 2f32.powi(-26);
        assert!(
            (largest(&grads) / expected - 1.0).abs() < 1e-2,
            "{} and {expected}",
            largest(&grads)
        );
        Ok(())
    });
}

/// Scales are powers of two: what does not overflow trains as without them.
#[test]
fn training_that_overflows_at_first_goes_on_with_a_smaller_scale() {
    in_half_precision(|mesh, mut model| {
        let device = mesh.device().clone().autodiff();
        let mut reference = model.clone();
        let (mut optim, mut own) = (AdamWConfig::new().init(), AdamWConfig::new().init());
        let mut scaler = GradScaler::new().with_init_scale(2f32.powi(18));
        let loss = |model: &Linear| {
            let x = tensor::<2>(mesh.rank() as u64 + 1, [2, WIDTH], &device);
            unit(model, x, |layer, x| layer.forward(x)).square().sum()
        };
        let mut steps = 0;
        for _ in 0..8 {
            let grads = GradientsParams::from_grads(scaler.scale(loss(&model)).backward(), &model);
            let mut is_stepped = false;
            model = scaler.step(model, grads, |model, grads| {
                is_stepped = true;
                Ok(optim.step(1e-2, model, grads))
            })?;
            scaler.update()?;
            if is_stepped {
                steps += 1;
                let grads = GradientsParams::from_grads(loss(&reference).backward(), &reference);
                reference = own.step(1e-2, reference, grads);
            }
        }
        assert!((1..8).contains(&steps), "{steps} of 8 steps are made");
        let diff = max_diff(
            &values(&full_model(&model)?, None),
            &values(&full_model(&reference)?, None),
        );
        assert!(diff < 1e-3, "{diff}");
        Ok(())
    });
}
