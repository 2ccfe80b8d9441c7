//! `optim::sharded` inside burn's `Learner`, compared with burn's own optimizers on one device.

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::ParamGroup;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, MuonConfig};
use burn::tensor::Device;
use burn::train::{Learner, SupervisedTraining};
use burn_dtensor::optim::{ShardedOptimizer, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::train::supervised;

use super::support::{
    BATCH, Folder, Net, Row, loader, metrics, on_ranks, part, rows, train_alone, train_on, weights,
};

fn clipped() -> AdamWConfig {
    AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.05)))
}

fn matrices() -> ParamGroup {
    ParamGroup::from_predicate("weight")
}

/// Three epochs by burn alone and on three ranks; the largest difference of a weight.
fn apart(
    name: &str,
    alone: ModuleOptimizer,
    on_shards: impl Fn() -> ShardedOptimizer + Sync,
) -> f32 {
    let train = rows(100, 4 * BATCH, 0.2);
    let model = Net::new(&Device::flex().autodiff());
    let folder = Folder::new(&format!("{name}-alone"));
    let training = SupervisedTraining::new(
        &folder,
        loader(train.clone(), BATCH),
        loader(train.clone(), BATCH),
    );
    let expected =
        metrics(training)
            .num_epochs(3)
            .launch(Learner::new(model, alone, ConstantLr::new(0.05)));
    let expected = weights(&expected.model);
    let folder = Folder::new(name);
    let trained = on_ranks(3, |mesh| {
        let own = |rows: &[Row]| loader(part(rows, mesh.rank(), 3), BATCH / 3);
        let model = fully_shard(
            Net::new(&mesh.device().clone().autodiff()),
            mesh,
            FullyShard::new(),
        )?;
        let optim = on_shards().into_module_optimizer(&model)?;
        let training = metrics(supervised(mesh, &folder, own(&train), own(&train))?).num_epochs(3);
        let result = training.launch(Learner::new(model, optim, ConstantLr::new(0.05)));
        Ok(weights(&full_model(&result.model)?))
    });
    let differences = trained.unwrap().into_iter().flat_map(|trained| {
        let pairs = trained
            .into_iter()
            .zip(expected.clone())
            .collect::<Vec<_>>();
        pairs.into_iter().map(|(a, b)| (a - b).abs())
    });
    differences.fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a })
}

#[test]
fn clipping_by_norm_in_a_learner_is_that_of_the_full_gradient() {
    let apart = apart("clipped", clipped().init(), || sharded(clipped()));
    assert!(apart < 1e-5, "{apart}");
}

/// Muon for matrices by burn alone and on three ranks; the largest difference of a weight.
fn muon_apart(name: &str, muon: &MuonConfig) -> f32 {
    let alone = clipped().init().with_group(matrices(), muon.build(), None);
    apart(name, alone, || {
        sharded(clipped()).with_muon(matrices(), muon.clone())
    })
}

#[test]
fn muon_in_a_learner_steps_full_matrices() {
    let apart = muon_apart("muon", &MuonConfig::new());
    assert!(apart < 1e-4, "{apart}");
}

#[test]
fn muon_in_a_learner_decays_weights() {
    let muon = MuonConfig::new().with_weight_decay(Some(WeightDecayConfig::new(0.1)));
    let apart = muon_apart("muon-decay", &muon);
    assert!(apart < 1e-4, "{apart}");
}

/// The optimizer steps after the third, the sixth and the last of seven batches.
#[test]
fn accumulated_gradients_in_a_learner_make_the_steps_of_one_device() {
    let train = rows(100, 7 * BATCH, 0.2);
    let set = |training: SupervisedTraining<Net>| training.num_epochs(2).grads_accumulation(3);
    let folder = Folder::new("accumulated-alone");
    let expected = weights(&train_alone(&folder, train.clone(), train.clone(), set).model);
    let folder = Folder::new("accumulated");
    let trained = on_ranks(3, |mesh| {
        let own = || loader(part(&train, mesh.rank(), 3), BATCH / 3);
        let result = train_on(mesh, &folder, own(), own(), set)?;
        Ok(weights(&full_model(&result.model)?))
    });
    for trained in trained.unwrap() {
        for (trained, expected) in trained.iter().zip(&expected) {
            assert!((trained - expected).abs() < 1e-5, "{trained} {expected}");
        }
    }
}
