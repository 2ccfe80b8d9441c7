//! Configurations that `fully_shard` refuses.

use burn::module::Module;
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, RmsNormConfig,
};
use burn::tensor::Device;
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{FsdpError, FullyShard, ReshardAfterForward, fully_shard};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::{Plan, parallelize};
use burn_dtensor::placement::{PartialOp, Placement};
use burn_dtensor::testing::MeshTest;

use super::net::net;
use crate::logged::warnings;

#[derive(Module, Debug)]
struct Noisy {
    noisy_norm: BatchNorm,
    blocks: Vec<(Linear, Dropout)>,
    frozen_dropout: Dropout,
}

fn noisy() -> Noisy {
    let device = Device::flex();
    let block = || {
        (
            LinearConfig::new(4, 4).init(&device),
            DropoutConfig::new(0.1).init(),
        )
    };
    Noisy {
        noisy_norm: BatchNormConfig::new(4).init(&device),
        blocks: (0..6).map(|_| block()).collect(),
        frozen_dropout: DropoutConfig::new(0.1).init().freeze(),
    }
}

/// Each once, with the paths; not where they change nothing or are not wanted.
#[test]
fn layers_that_differ_on_several_ranks_cause_a_warning() {
    let model = noisy();
    let shard = |ranks: &[usize], names: &[&'static str], config: fn() -> FullyShard| {
        MeshTest::new(ranks, names.to_vec()).run(|mesh| {
            let model = match names.contains(&"tp") {
                true => parallelize(model.clone(), &mesh.slice("tp")?, Plan::new())?,
                false => model.clone(),
            };
            fully_shard(model, &mesh.slice("shard")?, config()).map(drop)
        });
    };
    let quiet = warnings("Noisy", || {
        shard(&[1], &["shard"], FullyShard::new);
        shard(&[2], &["shard"], || {
            FullyShard::new().with_layer_warnings(false)
        });
    });
    assert_eq!(quiet, [""; 0]);
    let told = warnings("Noisy", || shard(&[2], &["shard"], FullyShard::new));
    let [norm, dropout] = &told[..] else {
        panic!("{told:?}")
    };
    assert!(
        norm.contains("each of the 2 data-parallel ranks")
            && norm.contains("in `noisy_norm` (Noisy, sharded at ")
    );
    assert!(
        norm.contains("`nn::sync_batch_norm`") && norm.contains("with_layer_warnings(false)"),
        "{norm}"
    );
    let paths = "in `blocks.0.1`, `blocks.1.1`, `blocks.2.1`, `blocks.3.1` and 2 more (Noisy, ";
    assert!(
        dropout.contains(paths) && dropout.contains("`burn_dtensor::nn::dropout`"),
        "{dropout}"
    );
    assert!(dropout.contains("with_dropout_warning(false)"), "{dropout}");
    // A parallelized batch norm computes with DTensors. Two slices are one model.
    let told = warnings("Noisy", || {
        shard(&[2, 2], &["shard", "tp"], FullyShard::new)
    });
    assert!(told.len() == 3 && told[2].contains("`Dropout`"), "{told:?}");
    // The dropout has a switch of its own.
    let told = warnings("Noisy", || {
        shard(&[2], &["shard"], || {
            FullyShard::new().with_dropout_warning(false)
        })
    });
    assert!(
        told.len() == 4 && told[3].contains("in `noisy_norm`"),
        "{told:?}"
    );
}

#[test]
fn wrong_configurations_are_typed_errors() {
    let model = net(&Device::flex());
    launch(Launch::threads(4), |world| {
        let shard = |config: FullyShard| {
            let mesh = DeviceMesh::new(world, [4], ["shard"]).unwrap();
            fully_shard(model.clone(), &mesh, config).map(|_| ()).expect_err("it is wrong")
        };
        let error = shard(FullyShard::new().with_units(["layers.*"]));
        assert!(
            matches!(&error, Error::Param(ParamError::NoMatch { pattern, .. }) if pattern == "layers.*"),
            "{error}"
        );
        assert!(error.to_string().contains("`blocks.0`"), "{error}");
        let error = shard(FullyShard::new().with_ignored(["blocks.9.weight"]));
        assert!(matches!(error, Error::Param(ParamError::NoMatch { what: "parameter", .. })));
        assert!(matches!(shard(FullyShard::new().with_units(["a.[b"])), Error::Param(ParamError::Pattern { .. })));
        let error = shard(FullyShard::new().with_reshard_after_forward(ReshardAfterForward::Ranks(3)));
        assert!(matches!(error, Error::Fsdp(FsdpError::ReshardRanks { ranks: 3, size: 4, .. })), "{error}");
        for placement in [Placement::Shard(2), Placement::Partial(PartialOp::Sum)] {
            let error = shard(FullyShard::new().with_shard_placement_fn(move |_| Some(placement)));
            assert!(
                matches!(&error, Error::Fsdp(FsdpError::Placement { param, .. }) if param.contains('.')),
                "{error}"
            );
        }
        let mesh = DeviceMesh::new(world, [4], ["shard"])?;
        let norm = RmsNormConfig::new(8).init(world.device());
        let error = fully_shard(norm, &mesh, FullyShard::new().with_shard_placement_fn(|_| Some(Placement::Shard(0))));
        assert!(matches!(error, Err(Error::Fsdp(FsdpError::StoredShape { module: "RmsNorm", .. }))));
        let mesh = DeviceMesh::new(world, [2, 2, 1], ["a", "b", "c"])?;
        let error = fully_shard(model.clone(), &mesh, FullyShard::new());
        assert!(matches!(error, Err(Error::Fsdp(FsdpError::MeshDims { .. }))));
        Ok(())
    })
    .unwrap();
}
