//! Training that continues from records on a rank whose shards have no elements.

use std::ops::Range;

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, ParamGroup};
use burn::nn::Linear;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, MuonConfig, OptimizerRecord, SgdConfig};
use burn::store::ModuleRecord;
use burn_dtensor::optim::{FullOptimizerState, ShardedOptimizer, parameter_specs, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::optimizers::{grads, layers};
use crate::fsdp::support::{on_device, values};

/// Makes an optimizer.
type Make = fn() -> ShardedOptimizer;

const MAKERS: [(&str, Make); 5] = [
    ("Sgd", || {
        sharded(SgdConfig::new().with_momentum(Some(MomentumConfig::new())))
    }),
    ("Adam", || sharded(AdamConfig::new())),
    ("AdamW", || sharded(AdamWConfig::new())),
    ("clipped", || {
        sharded(AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.1))))
    }),
    ("Muon", || {
        sharded(AdamWConfig::new())
            .with_muon(ParamGroup::from_predicate("weight"), MuonConfig::new())
    }),
];

fn train(
    optim: &mut ShardedOptimizer,
    mut model: Vec<Linear>,
    steps: Range<u64>,
) -> Result<Vec<Linear>> {
    for step in steps {
        let grads = grads(&model, step);
        model = optim.step(0.05, model, grads)?;
    }
    Ok(model)
}

/// To the bit, from burn's records in files, and from the state by path.
#[test]
fn a_rank_without_elements_continues_from_its_records() {
    let model = layers(true);
    MeshTest::new([4], ["shard"]).run(|mesh| {
        let begin = || {
            fully_shard(
                on_device(&model, &mesh.device().clone().autodiff()),
                mesh,
                FullyShard::new(),
            )
        };
        for (name, make) in MAKERS {
            let mut optim = make();
            let half = train(&mut optim, begin()?, 0..2)?;
            if mesh.rank() == 3 {
                assert_eq!(half[0].weight.base().dims(), [0, 4]);
            }
            let file = |kind: &str| {
                let name = format!(
                    "burn-dtensor-empty-{}-{name}-{}-{kind}.bpk",
                    std::process::id(),
                    mesh.rank()
                );
                std::env::temp_dir().join(name)
            };
            half.clone().into_record().save(file("model"))?;
            optim.to_record().save(file("optim"))?;
            let state = optim.state(&half)?.full()?.into_bytes()?;
            let expected = values(&full_model(&train(&mut optim, half, 2..4)?)?, None);

            let resumed =
                || Ok::<_, Error>(begin()?.load_record(ModuleRecord::load(file("model"))?));
            let by_id = make().load_record(OptimizerRecord::load(file("optim"))?);
            let state =
                FullOptimizerState::from_bytes(state)?.distribute(parameter_specs(&resumed()?)?)?;
            let by_path = make().load_state(&resumed()?, state)?;
            for mut optim in [by_id.clone(), by_path] {
                let trained = train(&mut optim, resumed()?, 2..4)?;
                assert_eq!(values(&full_model(&trained)?, None), expected, "{name}");
            }
            // As burn's `Learner` steps.
            let mut optim = by_id.into_module_optimizer(&resumed()?)?;
            let trained = (2..4).fold(resumed()?, |model, step| {
                let grads = grads(&model, step);
                optim.step(0.05, model, grads)
            });
            assert_eq!(
                values(&full_model(&trained)?, None),
                expected,
                "{name}, as burn's optimizer"
            );
            for kind in ["model", "optim"] {
                std::fs::remove_file(file(kind))?;
            }
        }
        Ok(())
    });
}
