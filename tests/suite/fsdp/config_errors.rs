//! Configurations that `fully_shard` refuses.

use burn::nn::RmsNormConfig;
use burn::tensor::Device;
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{FsdpError, FullyShard, ReshardAfterForward, fully_shard};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::{PartialOp, Placement};

use super::net::net;

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
