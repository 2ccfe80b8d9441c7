//! The whole model on one rank.

use burn::module::Module;
use burn::tensor::Device;
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::full_model_on;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::values;
use crate::parallel::support::{Net, distribute_with, plan};

#[test]
fn one_rank_has_the_model_that_was_distributed() {
    let model = Net::new(&Device::flex());
    let expected = values(&model, None);
    for test in [
        MeshTest::new([1], ["shard"]),
        MeshTest::new([3], ["shard"]),
        MeshTest::new([2, 2], ["replicate", "shard"]),
        MeshTest::new([2], ["tp"]),
        MeshTest::new([2, 2], ["shard", "tp"]),
        MeshTest::new([2, 2, 2], ["replicate", "shard", "tp"]),
    ] {
        test.run(|mesh| {
            let units = FullyShard::new().with_units(["blocks.*"]);
            let sharded = match mesh.names().iter().any(|name| name == "tp") {
                true => distribute_with(model.clone(), mesh, plan(), units)?,
                false => fully_shard(model.clone(), mesh, units)?,
            };
            let ledger = mesh.world().ledger();
            for root in [0, mesh.size() - 1] {
                ledger.reset();
                let full = full_model_on(&sharded, root)?;
                let on_one = ledger.snapshot();
                assert_eq!(
                    full.as_ref().map(|full| values(full, None)),
                    (mesh.rank() == root).then(|| expected.clone())
                );
                // An ordinary model, which keeps its ids.
                let ids = |net: &Net| net.head.weight.id;
                assert!(full.is_none_or(
                    |full| full.head.weight.shard().is_none() && ids(&full) == ids(&model)
                ));
                ledger.reset();
                full_model(&sharded)?;
                assert_eq!(ledger.snapshot(), on_one);
            }
            Ok(())
        });
    }
}

#[test]
fn a_rank_without_a_shard_and_an_unsharded_model_are_refused() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let sharded = fully_shard(model.clone(), mesh, FullyShard::new())?;
        let outside = full_model_on(&sharded, 2).map(|_| ());
        assert!(
            matches!(
                outside,
                Err(Error::Param(ParamError::NotOfMesh { rank: 2, .. }))
            ),
            "{outside:?}"
        );
        let full = full_model_on(&model.clone().no_grad(), 0).map(|_| ());
        assert!(
            matches!(full, Err(Error::Param(ParamError::NotSharded))),
            "{full:?}"
        );
        Ok(())
    });
}

/// The first parameter's ranks are fewer than the model's.
#[test]
fn a_parameter_that_fully_shard_ignores_hides_no_rank() {
    let model = Net::new(&Device::flex());
    let expected = values(&model, None);
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let parallel = parallelize(model.clone(), &mesh.slice("tp")?, plan())?;
        let first = named_parameters(&parallel)?[0].path.clone();
        let sharded = fully_shard(
            parallel,
            &mesh.slice("shard")?,
            FullyShard::new().with_ignored([first]),
        )?;
        for root in 0..mesh.size() {
            let full = full_model_on(&sharded, root)?;
            assert_eq!(
                full.map(|full| values(&full, None)),
                (mesh.rank() == root).then(|| expected.clone())
            );
        }
        Ok(())
    });
}
