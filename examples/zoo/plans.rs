//! The distribution and the optimizer of each model.

use burn::module::ParamGroup;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, MuonConfig, SgdConfig};
use burn_dtensor::fsdp::OffloadPolicy;
use burn_dtensor::optim::{ShardedOptimizer, sharded};
use burn_dtensor::prelude::*;

use crate::bert::Bert;
use crate::moe::Moe;
use crate::resnet::ResNet;

/// Replicates shards (HSDP), with all of them in host memory.
pub fn bert(model: Bert, mesh: &DeviceMesh) -> Result<Bert> {
    fully_shard(
        model,
        mesh,
        FullyShard::new()
            .with_units(["encoder.layers.*"])
            .with_offload(OffloadPolicy::Cpu),
    )
}

/// Shards into equal bytes: with few channels, chunks would leave the last ranks empty. The shards
/// of the first stage, whose images are the largest, are in host memory.
pub fn resnet(model: ResNet, mesh: &DeviceMesh) -> Result<ResNet> {
    let config = FullyShard::new()
        .with_units(["stages.*.*"])
        .with_balanced_bytes()
        .with_offload_for(["stages.0.*"], OffloadPolicy::Cpu);
    fully_shard(
        model,
        mesh,
        config.with_reshard_after_forward(ReshardAfterForward::Always),
    )
}

/// Shards experts over `ep`, and each expert over `tp`. All other parameters are sharded over the
/// ranks of `shard` and `ep` together. After forward, weights are resharded to groups of as many
/// neighbouring ranks as `shard` has.
pub fn moe(mut model: Moe, mesh: &DeviceMesh) -> Result<Moe> {
    let split = Plan::new()
        .with_style("up", Style::placed(Placement::Shard(2)))
        .with_style("gate", Style::placed(Placement::Shard(2)))
        .with_style("down", Style::placed(Placement::Shard(1)));
    let plan = Plan::new()
        .with_mesh_dim_plan(
            "ep",
            Plan::new().with_style("*", Style::placed(Placement::Shard(0))),
        )
        .with_mesh_dim_plan("tp", split);
    for block in &mut model.blocks {
        block.experts = parallelize(
            block.experts.clone(),
            &mesh.slice(["ep", "tp"])?,
            plan.clone(),
        )?;
    }
    let near = ReshardAfterForward::Ranks(mesh.size_of(0));
    let config = FullyShard::new()
        .with_units(["blocks.*"])
        .with_shard_dims(["shard", "ep"])
        .with_reshard_after_forward(near);
    fully_shard(model, mesh, config.with_offload(OffloadPolicy::Cpu))
}

/// Returns AdamW. Its epsilon is large enough that rounding does not determine the direction of a
/// weight with zero gradient.
pub fn adamw() -> (ShardedOptimizer, ModuleOptimizer) {
    let config = AdamWConfig::new().with_epsilon(1e-5);
    (sharded(config.clone()), config.init())
}

/// Returns gradient descent with momentum.
pub fn momentum() -> (ShardedOptimizer, ModuleOptimizer) {
    let config = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    (sharded(config.clone()), config.init())
}

/// Returns Muon for the matrices of attention, and AdamW for all other parameters.
pub fn muon() -> (ShardedOptimizer, ModuleOptimizer) {
    let matrices = ParamGroup::from_predicates(vec!["attention.", "weight"]);
    let config = MuonConfig::new();
    let (shards, full) = adamw();
    (
        shards.with_muon(matrices.clone(), config.clone()),
        full.with_group(matrices, config.build(), None),
    )
}
