//! `sharded`: burn's configurations, clipping, schedulers and accumulators on shards, beside one
//! device.

use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::lr_scheduler::LrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLrScheduler, ModuleLrSchedulerConfig};
use burn::lr_scheduler::noam::NoamLrSchedulerConfig;
use burn::module::{Param, ParamGroup};
use burn::nn::Linear;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsAccumulator, GradientsParams,
    LionConfig, ModuleOptimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::mesh_test;
use burn_dtensor::optim::{ShardedOptimizer, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::optimizers::{grads, layers};
use crate::fsdp::support::{max_diff, on_device, tensor, values};

type Pair = (fn() -> ModuleOptimizer, fn() -> ShardedOptimizer);

fn by_norm(max_norm: f32) -> Option<GradientClippingConfig> {
    Some(GradientClippingConfig::Norm(max_norm))
}

fn by_value() -> Option<GradientClippingConfig> {
    Some(GradientClippingConfig::Value(0.1))
}

/// [`layers`] whose values are the same on every rank, whatever else draws random numbers.
fn fixed(device: &Device) -> Vec<Linear> {
    let linear = |seed, shape: [usize; 2]| Linear {
        weight: Param::from_tensor(tensor(seed, shape, device)),
        bias: Some(Param::from_tensor(tensor(seed + 1, [shape[1]], device))),
    };
    vec![linear(1, [5, 4]), linear(3, [7, 3])]
}

/// Six steps of burn's own on one device and of ours on the mesh; how far apart they come.
fn apart(test: &MeshTest, (own, on_shards): Pair) -> f64 {
    let model = layers(true);
    let step_alone = |mut model: Vec<Linear>| {
        let mut optim = own();
        for step in 0..6 {
            let grads = grads(&model, step);
            model = optim.step(0.05, model, grads);
        }
        model
    };
    let expected = values(
        &step_alone(on_device(&model, &Device::flex().autodiff())),
        None,
    );
    let apart = test.run(|mesh| {
        let mut optim = on_shards();
        let mut model = fully_shard(
            on_device(&model, &mesh.device().clone().autodiff()),
            mesh,
            FullyShard::new(),
        )?;
        for step in 0..6 {
            let grads = grads(&model, step);
            model = optim.step(0.05, model, grads)?;
        }
        Ok(max_diff(&values(&full_model(&model)?, None), &expected))
    });
    apart
        .into_iter()
        .fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a })
}

#[test]
fn configurations_of_all_that_is_exact_are_taken_with_their_clipping_by_value() {
    let pairs: [Pair; 7] = [
        (
            || SgdConfig::new().with_gradient_clipping(by_value()).init(),
            || sharded(SgdConfig::new().with_gradient_clipping(by_value())),
        ),
        (
            || AdamConfig::new().with_grad_clipping(by_value()).init(),
            || sharded(AdamConfig::new().with_grad_clipping(by_value())),
        ),
        (
            || AdamWConfig::new().with_grad_clipping(by_value()).init(),
            || sharded(AdamWConfig::new().with_grad_clipping(by_value())),
        ),
        (
            || AdaGradConfig::new().with_grad_clipping(by_value()).init(),
            || sharded(AdaGradConfig::new().with_grad_clipping(by_value())),
        ),
        (
            || RmsPropConfig::new().with_grad_clipping(by_value()).init(),
            || sharded(RmsPropConfig::new().with_grad_clipping(by_value())),
        ),
        (
            || AdanConfig::new().with_grad_clipping(by_value()).init(),
            || sharded(AdanConfig::new().with_grad_clipping(by_value())),
        ),
        (
            || LionConfig::new().with_grad_clipping(by_value()).init(),
            || sharded(LionConfig::new().with_grad_clipping(by_value())),
        ),
    ];
    let test = MeshTest::new([3], ["shard"]);
    for (at, pair) in pairs.into_iter().enumerate() {
        assert_eq!(apart(&test, pair), 0.0, "pair {at}");
        let [clipped, plain] = [pair.0(), AdamWConfig::new().init()];
        assert!(clipped.has_gradient_clipping() && !plain.has_gradient_clipping());
    }
}

#[test]
fn a_group_has_its_own_optimizer_and_clipping() {
    let weights = || ParamGroup::from_predicate("weight");
    let pair: Pair = (
        || {
            let clipping = Some(GradientClipping::Value(0.1));
            AdamWConfig::new().init().with_group(
                ParamGroup::from_predicate("weight"),
                SgdConfig::new().build(),
                clipping,
            )
        },
        || {
            sharded(AdamWConfig::new()).with_group(
                ParamGroup::from_predicate("weight"),
                SgdConfig::new().with_gradient_clipping(by_value()),
            )
        },
    );
    assert_eq!(apart(&MeshTest::new([2], ["shard"]), pair), 0.0);
    // A bare optimizer clips nothing.
    let _ = sharded(AdamWConfig::new().build()).with_group(weights(), SgdConfig::new().build());
}

/// Of each gradient apart, as burn clips. Below one norm, above the other: the bias of the last
/// layer stays.
#[test]
fn clipping_by_norm_is_by_that_of_the_full_gradient() {
    let everywhere: Pair = (
        || SgdConfig::new().with_gradient_clipping(by_norm(1.2)).init(),
        || sharded(SgdConfig::new().with_gradient_clipping(by_norm(1.2))),
    );
    let in_a_group: Pair = (
        || {
            let clipping = Some(GradientClipping::Norm(0.5));
            AdamWConfig::new().init().with_group(
                ParamGroup::from_predicate("1."),
                SgdConfig::new().build(),
                clipping,
            )
        },
        || {
            sharded(AdamWConfig::new()).with_group(
                ParamGroup::from_predicate("1."),
                SgdConfig::new().with_gradient_clipping(by_norm(0.5)),
            )
        },
    );
    for pair in [everywhere, in_a_group] {
        for ranks in [1, 2, 3, 4, 8] {
            let diff = apart(&MeshTest::new([ranks], ["shard"]), pair);
            // Squares are summed in another order.
            assert!(diff < 1e-6, "{diff} apart on {ranks}");
        }
        let diff = apart(&MeshTest::new([2, 2], ["replicate", "shard"]), pair);
        assert!(diff < 1e-6, "{diff} apart");
    }
    // What burn makes of shards is another thing.
    let wrong = MeshTest::new([2], ["shard"]).run(|mesh| {
        let model = fully_shard(
            fixed(&mesh.device().clone().autodiff()),
            mesh,
            FullyShard::new(),
        )?;
        let step = |mut optim: ModuleOptimizer| {
            let grads = grads(&model, 0);
            full_model(&optim.step(0.05, model.clone(), grads))
        };
        let clipped = SgdConfig::new().with_gradient_clipping(by_norm(1.2)).init();
        let ours = sharded(SgdConfig::new().with_gradient_clipping(by_norm(1.2))).step(
            0.05,
            model.clone(),
            grads(&model, 0),
        )?;
        mesh.world().ledger().reset();
        let burns = step(clipped)?;
        Ok(max_diff(
            &values(&full_model(&ours)?, None),
            &values(&burns, None),
        ))
    });
    assert!(wrong[0] > 1e-4, "{} apart", wrong[0]);
}

#[test]
fn all_norms_travel_together_and_nothing_without_them() {
    MeshTest::new([2, 2], ["replicate", "shard"]).run(|mesh| {
        let plain = fixed(&mesh.device().clone().autodiff());
        let model = fully_shard(plain, mesh, FullyShard::new())?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        let model = sharded(SgdConfig::new()).step(0.1, model.clone(), grads(&model, 0))?;
        assert_eq!(ledger.total(|_| true).calls, 0);
        sharded(SgdConfig::new().with_gradient_clipping(by_norm(1.0))).step(
            0.1,
            model.clone(),
            grads(&model, 1),
        )?;
        assert_eq!(
            (ledger.total(|_| true).calls, ledger.bytes(Op::AllReduce)),
            (1, 4 * 4),
            "a number for each gradient"
        );
        Ok(())
    });
}

/// Another rate in every step, and for some parameters another schedule.
fn scheduled(mesh: &DeviceMesh) -> Result<()> {
    let schedulers = || -> [ModuleLrScheduler; 2] {
        let noam = LrSchedulerConfig::from(
            NoamLrSchedulerConfig::new(0.5)
                .with_warmup_steps(3)
                .with_model_size(16),
        );
        let linear = LinearLrSchedulerConfig::new(0.1, 0.01, 5);
        let grouped = ModuleLrSchedulerConfig::new(noam.clone())
            .with_group(ParamGroup::from_predicate("0."), linear);
        [ModuleLrSchedulerConfig::new(noam), grouped]
            .map(|config| config.init().expect("a schedule"))
    };
    let plain = fixed(&mesh.device().clone().autodiff());
    for (mut alone, mut together) in schedulers().into_iter().zip(schedulers()) {
        let (mut own, mut optim) = (AdamWConfig::new().init(), sharded(AdamWConfig::new()));
        let (mut expected, mut model) = (
            plain.clone(),
            fully_shard(plain.clone(), mesh, FullyShard::new())?,
        );
        for step in 0..6 {
            let full_grads = grads(&expected, step);
            expected = own.step(alone.step(), expected, full_grads);
            let shard_grads = grads(&model, step);
            model = optim.step(together.step(), model, shard_grads)?;
        }
        assert_eq!(values(&full_model(&model)?, None), values(&expected, None));
        assert!(
            max_diff(&values(&expected, None), &values(&plain, None)) > 1e-3,
            "it has stepped"
        );
    }
    Ok(())
}

mesh_test!(
    schedulers_of_burn_set_the_rates_of_shards,
    [3],
    ["shard"],
    scheduled
);

/// burn's accumulator adds up shards: of three backwards, each reduced, as of the whole model's.
#[test]
fn accumulated_gradients_of_shards_are_those_of_the_full_model() {
    for ranks in [1, 2, 3, 4] {
        MeshTest::new([ranks], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let plain = fixed(&device);
            let loss = |model: &Vec<Linear>, step: u64| {
                let x =
                    [5, 7].map(|width| tensor::<2>(step * 10 + width as u64, [3, width], &device));
                let loss =
                    |(layer, x): (&Linear, Tensor<2>)| layer.forward(x).tanh().square().mean();
                model
                    .iter()
                    .zip(x)
                    .map(loss)
                    .reduce(|a, b| a + b)
                    .expect("two layers")
            };
            let accumulated = |model: &Vec<Linear>, step: u64| {
                let mut accumulator = GradientsAccumulator::new();
                for part in 0..3 {
                    let grads =
                        GradientsParams::from_grads(loss(model, 3 * step + part).backward(), model);
                    accumulator.accumulate(model, grads);
                }
                accumulator.grads()
            };
            let (mut expected, mut model) =
                (plain.clone(), fully_shard(plain, mesh, FullyShard::new())?);
            let (mut own, mut optim) = (AdamWConfig::new().init(), sharded(AdamWConfig::new()));
            for step in 0..10 {
                let full_grads = accumulated(&expected, step);
                expected = own.step(1e-2, expected, full_grads);
                let shard_grads = accumulated(&model, step);
                model = optim.step(1e-2, model, shard_grads)?;
            }
            let diff = max_diff(
                &values(&full_model(&model)?, None),
                &values(&expected, None),
            );
            assert!(diff < 1e-6, "{diff} apart on {ranks}");
            Ok(())
        });
    }
}
