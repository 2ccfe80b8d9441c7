//! `clip_grad_norm` of odd gradients.

use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{FullyShard, NormType, clip_grad_norm, fully_shard};
use burn_dtensor::mesh::DeviceMesh;

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
    .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_norm_that_is_no_number_makes_no_gradient_one() {
    for (norm, grad) in clipped(f64::NAN, DType::F32, 1.0) {
        assert!(norm.is_nan() && grad.iter().all(|element| element.is_nan()), "{norm} {grad:?}");
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
    assert_eq!(all.unwrap_or_else(|error| panic!("{error}")), [true, true]);
}

/// Beyond the range of single precision, and below its resolution.
#[test]
fn double_precision_gradients_have_a_norm_of_double_precision() {
    for value in [1e25, 1.0 + 1e-12] {
        for (norm, grad) in clipped(value, DType::F64, 1.0) {
            assert!((norm / (4.0 * value) - 1.0).abs() < 1e-14, "{norm:e} for {:e}", 4.0 * value);
            assert!(grad.iter().all(|element| (element - 0.25).abs() < 1e-6), "{grad:?}");
        }
    }
}
