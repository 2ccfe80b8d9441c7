//! Steps of kernels for lists of tensors, against burn's steps of one tensor after the other on the
//! same device.

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, LionConfig, Optimizer, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::cube::in_lists;
use super::{FusedAdam, FusedAdamW, FusedLion, FusedSgd};
use crate::memory::cube::{id, primitive};
use crate::memory::gpu::gpu;
use crate::optim::factor::{GradFactor, scaled_by};
use crate::optim::state_exchange::flattened;

/// Lengths around those of a cube's task, and few that a vector divides.
const LENGTHS: [usize; 9] = [1, 2, 5, 255, 1024, 1025, 4096, 5000, 70_000];

/// The largest difference of one step, relative to the values: a few units in the last place.
const BOUND: f32 = 3e-6;

fn values(rng: &mut StdRng, len: usize, device: &Device) -> Tensor<1> {
    let values: Vec<f32> = (0..len).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

/// Largest difference, relative to the magnitude of the values where that is more than 1e-3.
fn apart(a: &TensorData, b: &TensorData) -> f32 {
    let [a, b] = [a, b].map(|data| data.clone().try_to_vec::<f32>().expect("single precision"));
    assert_eq!(a.len(), b.len());
    let apart = |(a, b): (&f32, &f32)| (a - b).abs() / b.abs().max(1e-3);
    a.iter()
        .zip(&b)
        .map(apart)
        .fold(0.0, |most, apart| match apart.is_nan() {
            true => f32::NAN,
            false => most.max(apart),
        })
}

/// Steps lists by both optimizers, from the same tensors in each step.
fn lists_step_as<F: Optimizer, B: Optimizer>(fused: &F, burn: &B, buffers: usize, what: &str) {
    let device = gpu();
    let mut rng = StdRng::seed_from_u64(61);
    let params: Vec<_> = LENGTHS.map(|len| values(&mut rng, len, &device)).into();
    let mut found: Vec<_> = params.iter().map(|param| (param.clone(), None)).collect();
    let mut expected: Vec<_> = params.iter().map(|param| (param.clone(), None)).collect();
    let factor = GradFactor::one().then(0.125);
    for step in 0..4 {
        let lr = [1e-2, 1e-3][step % 2];
        let grads: Vec<_> = LENGTHS.map(|len| values(&mut rng, len, &device)).into();
        let (stepped, launches) = in_lists(|| {
            scaled_by(factor, || {
                let all = found.drain(..).zip(&grads);
                all.map(|((param, state), grad)| fused.step(lr, param, grad.clone(), state))
                    .collect::<Vec<_>>()
            })
        });
        found = stepped;
        let all = expected.drain(..).zip(&grads);
        expected = all
            .map(|((param, state), grad)| burn.step(lr, param, grad.clone() * 0.125, state))
            .collect();
        let hardware = primitive(&grads[0].clone().into_dispatch())
            .expect("a Cube tensor")
            .client
            .properties()
            .hardware
            .max_bindings as usize;
        let of_launch = (hardware - 3) / buffers;
        // burn makes the first step of a parameter with a state.
        let lists = if step == 0 && buffers > 2 {
            0
        } else {
            LENGTHS.len()
        };
        assert_eq!(launches, lists.div_ceil(of_launch), "{what}, step {step}");
        for (found, expected) in found.iter().zip(&expected) {
            let apart_by = apart(
                &found.0.clone().into_data(),
                &expected.0.clone().into_data(),
            );
            assert!(apart_by <= BOUND, "{what}, step {step}: {apart_by}");
        }
        for ((_, found), (_, expected)) in found.iter().zip(&expected) {
            let (Some(found), Some(expected)) = (found, expected) else {
                panic!("{what} has a state");
            };
            let [found, expected] = [flattened(found), flattened(expected)];
            for ((name, a), (_, b)) in found.tensors.iter().zip(&expected.tensors) {
                let apart_by = apart(a, b);
                assert!(
                    apart_by <= 10.0 * BOUND,
                    "{what}, step {step}: {name} {apart_by}"
                );
            }
        }
    }
}

#[test]
fn lists_of_adamw_and_adam_step_as_with_burns_operations() {
    for decay in [0.0, 0.3] {
        let config = AdamWConfig::new().with_weight_decay(decay);
        lists_step_as(&FusedAdamW::from(&config), &config.build(), 4, "AdamW");
    }
    for decay in [None, Some(WeightDecayConfig::new(0.3))] {
        let config = AdamConfig::new().with_weight_decay(decay);
        lists_step_as(&FusedAdam::from(&config), &config.build(), 4, "Adam");
    }
}

#[test]
fn lists_of_lion_and_sgd_step_as_with_burns_operations() {
    let config = LionConfig::new().with_weight_decay(0.3);
    lists_step_as(&FusedLion::from(&config), &config.build(), 3, "Lion");
    let decay = Some(WeightDecayConfig::new(0.3));
    let momentum = |nesterov| Some(MomentumConfig::new().with_nesterov(nesterov));
    for (momentum, buffers) in [(None, 2), (momentum(false), 3), (momentum(true), 3)] {
        let config = SgdConfig::new()
            .with_weight_decay(decay.clone())
            .with_momentum(momentum);
        lists_step_as(&FusedSgd::from(&config), &config.build(), buffers, "Sgd");
    }
}

/// Memory that no other handle reads is written in place, and other memory is copied. A view of a
/// gradient is read in its order.
#[test]
fn memory_that_others_read_is_not_written() {
    let device = gpu();
    let mut rng = StdRng::seed_from_u64(7);
    let optimizer = FusedSgd::from(&SgdConfig::new());
    let place = |tensor: &Tensor<2>| {
        let tensor = tensor.clone().into_dispatch();
        id(&primitive(&tensor).expect("a Cube tensor").handle)
    };
    let param = values(&mut rng, 15, &device)
        .reshape([5, 3])
        .mul_scalar(1.0);
    let grad = values(&mut rng, 15, &device)
        .reshape([3, 5])
        .swap_dims(0, 1);
    let expected = (param.clone() - grad.clone() * 0.5).into_data();
    let before = place(&param);
    let ((stepped, _), launches) = in_lists(|| optimizer.step(0.5, param, grad.clone(), None));
    assert_eq!(launches, 1);
    assert_eq!(place(&stepped), before);
    assert_eq!(stepped.clone().into_data(), expected);

    let kept = stepped.clone();
    let ((next, _), _) = in_lists(|| optimizer.step(0.5, stepped, grad, None));
    assert_ne!(place(&next), before);
    assert_eq!(kept.into_data(), expected);
}

/// A step whose result is read at once is launched at once, also among those of a list.
#[test]
fn a_result_that_is_read_at_once_is_there() {
    let device = gpu();
    let optimizer = FusedSgd::from(&SgdConfig::new());
    let ones = || Tensor::<1>::ones([4], &device);
    let (read, launches) = in_lists(|| {
        let collected = optimizer.step(0.5, ones(), ones(), None);
        let read = super::at_once(|| optimizer.step(0.5, ones(), ones(), None)).0 * 2.0;
        (collected.0, read)
    });
    assert_eq!(launches, 1);
    for (tensor, expected) in [(read.0, 0.5), (read.1, 1.0)] {
        let values = tensor
            .into_data()
            .try_to_vec::<f32>()
            .expect("single precision");
        assert_eq!(values, [expected; 4]);
    }
}
