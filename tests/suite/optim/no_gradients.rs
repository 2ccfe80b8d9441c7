//! Steps without a gradient of the model.

use burn::module::ParamGroup;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, MuonConfig};
use burn::tensor::Tensor;
use burn_dtensor::fsdp::GradScaler;
use burn_dtensor::optim::{OptimError, ShardedOptimizer, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::support::values;

fn optimizers() -> [ShardedOptimizer; 2] {
    let muon = sharded(AdamWConfig::new())
        .with_muon(ParamGroup::from_predicate("weight"), MuonConfig::new());
    [sharded(AdamWConfig::new()), muon]
}

#[test]
fn gradients_of_another_model_are_an_error_on_every_rank() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let new = || {
            fully_shard::<Linear>(
                LinearConfig::new(4, 3).init(&device),
                mesh,
                FullyShard::new(),
            )
        };
        let (model, other) = (new()?, new()?);
        for mut optim in optimizers() {
            let grads = || {
                let loss = unit(&other, Tensor::<2>::ones([2, 4], &device), |other, x| {
                    other.forward(x)
                })
                .sum();
                GradientsParams::from_grads(loss.backward(), &other)
            };
            let error = optim
                .step(0.1, model.clone(), grads())
                .map(drop)
                .unwrap_err();
            let Error::Optim(OptimError::NoGradients {
                path,
                trained: 2,
                grads: 2,
            }) = &error
            else {
                panic!("{error}")
            };
            assert_eq!(path, "weight");
            assert!(error.to_string().contains("from_grads"), "{error}");
            let before = values(&full_model(&model)?, None);
            let mut optim = optim.with_empty_steps_allowed(true);
            let stepped = optim.step(0.1, model.clone(), grads())?;
            assert_eq!(values(&full_model(&stepped)?, None), before);
        }
        Ok(())
    });
}

/// A rank without elements of any parameter has gradients of them.
#[test]
fn empty_shards_are_no_missing_gradients() {
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let mut model = fully_shard::<Linear>(
            LinearConfig::new(1, 1).init(&device),
            mesh,
            FullyShard::new(),
        )?;
        for mut optim in optimizers() {
            let loss = unit(&model, Tensor::<2>::ones([2, 1], &device), |model, x| {
                model.forward(x)
            })
            .sum();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(0.1, model, grads)?;
        }
        Ok(())
    });
}

#[test]
fn a_step_that_the_scaler_skips_is_none() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard::<Linear>(
            LinearConfig::new(4, 3).init(&device),
            mesh,
            FullyShard::new(),
        )?;
        let (mut optim, mut scaler) = (sharded(AdamWConfig::new()), GradScaler::new());
        let loss = unit(
            &model,
            Tensor::<2>::full([2, 4], f32::INFINITY, &device),
            |model, x| model.forward(x),
        )
        .sum();
        let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
        let before = values(&full_model(&model)?, None);
        let model = scaler.step(model, grads, |model, grads| optim.step(0.1, model, grads))?;
        assert_eq!(values(&full_model(&model)?, None), before);
        Ok(())
    });
}
