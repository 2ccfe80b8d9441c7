//! Factors of gradients that a step applies, against passes over the gradients before it.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, LionConfig, MuonConfig, RmsPropConfig, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::fsdp::{ClipGradNorm, GradScaler};
use burn_dtensor::optim::{GradFactor, ShardedOptimizer, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::support::{on_device, tensor, values};

fn optimizers() -> Vec<ShardedOptimizer> {
    let weight = || ParamGroup::from_predicate("weight");
    let by_value = Some(GradientClippingConfig::Value(0.01));
    let by_norm = Some(GradientClippingConfig::Norm(0.01));
    vec![
        sharded(AdamWConfig::new()),
        sharded(SgdConfig::new()).with_group(weight(), LionConfig::new()),
        // Not fused.
        sharded(RmsPropConfig::new()),
        // Those that read a gradient before the step.
        sharded(AdamWConfig::new().with_grad_clipping(by_value)),
        sharded(SgdConfig::new())
            .with_group(weight(), AdamWConfig::new().with_grad_clipping(by_norm)),
        sharded(AdamWConfig::new()).with_muon(weight(), MuonConfig::new()),
    ]
}

/// Gradients of a loss that this scaler has scaled, which differ on the ranks before they are reduced.
fn grads(
    model: &Linear,
    scaler: &GradScaler,
    step: u64,
    rank: usize,
    device: &Device,
) -> GradientsParams {
    let x = tensor(10 * step + rank as u64, [3, 5], device);
    let loss = unit(model, x, |model, x| model.forward(x)).square().sum();
    GradientsParams::from_grads(scaler.scale(loss).backward(), model)
}

#[test]
fn a_step_that_unscales_and_clips_is_that_after_passes_over_the_gradients() {
    let origin = LinearConfig::new(5, 4).init(&Device::flex());
    for scale in [65536.0, 1000.0] {
        for at in 0..optimizers().len() {
            MeshTest::new([2], ["shard"]).run(|mesh| {
                let device = mesh.device().clone().autodiff();
                let rank = mesh.world().rank();
                let made = || fully_shard(on_device(&origin, &device), mesh, FullyShard::new());
                let (mut before, mut inside) = (made()?, made()?);
                let [mut optim_before, mut optim_inside] =
                    [optimizers().remove(at), optimizers().remove(at)];
                let mut scalers = [(); 2].map(|()| GradScaler::new().with_init_scale(scale));
                let clip = ClipGradNorm::new(0.5);
                for step in 0..4 {
                    let [scaler, other] = &mut scalers;
                    let mut unscaled = grads(&before, scaler, step, rank, &device);
                    assert!(scaler.unscale(&before, &mut unscaled)?);
                    let expected_norm = clip.clip(&before, &mut unscaled)?;
                    before = scaler.step(before, unscaled, |model, grads| {
                        optim_before.step(0.1, model, grads)
                    })?;
                    scaler.update()?;

                    let scaled = grads(&inside, other, step, rank, &device);
                    let factor = other.factor(&inside, &scaled)?;
                    assert_eq!(factor.value(), f64::from(scale).recip());
                    let (norm, factor) = clip.factor(&inside, &scaled, factor)?;
                    assert_eq!(norm.to_bits(), expected_norm.to_bits(), "step {step}");
                    assert!(norm > 0.5, "the gradients are clipped");
                    inside = other.step(inside, scaled, |model, grads| {
                        optim_inside.step_scaled(0.1, model, grads, factor)
                    })?;
                    other.update()?;
                    let expected = values(&full_model(&before)?, None);
                    assert_eq!(
                        values(&full_model(&inside)?, None),
                        expected,
                        "optimizer {at}, scale {scale}, step {step}"
                    );
                }
                Ok(())
            });
        }
    }
}

/// Gradients that are not finite skip the step, and gradients in half precision are rounded after
/// each factor.
#[test]
fn overflow_skips_the_step_and_halves_are_rounded_after_each_factor() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard::<Linear>(
            LinearConfig::new(5, 4).init(&device),
            mesh,
            FullyShard::new(),
        )?;
        let mut scaler = GradScaler::new().with_init_scale(f32::MAX);
        let scaled = grads(&model, &scaler, 1, 0, &device);
        let factor = scaler.factor(&model, &scaled)?;
        assert_eq!(factor, GradFactor::one());
        let before = values(&full_model(&model)?, None);
        let mut optim = sharded(AdamWConfig::new());
        let kept = scaler.step(model, scaled, |model, grads| {
            optim.step_scaled(0.1, model, grads, factor)
        })?;
        assert_eq!(values(&full_model(&kept)?, None), before);

        let numbers: Tensor<1> = tensor(5, [64], &Device::flex());
        let grad = numbers.clone().cast(DType::BF16);
        let factors = [1.0 / 1000.0, 0.37, 3.1];
        let rounded = factors.into_iter().fold(grad.clone(), Tensor::mul_scalar);
        let at_once = grad.clone().mul_scalar(factors.iter().product::<f64>());
        assert_ne!(
            rounded.clone().into_data(),
            at_once.into_data(),
            "the numbers tell one rounding from two"
        );
        let device = Device::flex().autodiff();
        // From zero, and with a rate of 1, the step is the gradient.
        let zeros = Tensor::<1>::from_inner(numbers.zeros_like().cast(DType::BF16));
        let model = || Param::from_tensor(zeros.clone().to_device(&device));
        let step = |grad: Tensor<1>, factor| {
            let param = model();
            let mut grads = GradientsParams::new();
            grads.register(param.id, grad);
            let optim = || sharded(SgdConfig::new()).with_empty_steps_allowed(true);
            Ok::<_, Error>(
                optim()
                    .step_scaled(1.0, param, grads, factor)?
                    .val()
                    .into_data(),
            )
        };
        let factor = factors
            .into_iter()
            .fold(GradFactor::one(), GradFactor::then);
        assert_eq!(step(grad, factor)?, step(rounded, GradFactor::one())?);
        Ok(())
    });
}
