//! What a run says of sharding, in the terms of this crate.

use burn::tensor::DType;
use burn_dtensor::Result;
use burn_dtensor::comm::World;
use burn_dtensor::fsdp::{FullyShard, MixedPrecisionPolicy, ParamInfo, ReshardAfterForward};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;
use serde_json::Value;

use super::file::Run;

/// The mesh dimensions that share the batch, and those that share the layers.
pub fn meshes(world: &World, run: &Run) -> Result<(Option<DeviceMesh>, Option<DeviceMesh>)> {
    let dims = run.dims();
    if dims.is_empty() {
        return Ok((None, None));
    }
    let shape = run.mesh.as_ref().expect("a parallel run has a mesh");
    let mesh = DeviceMesh::new(world, shape, dims)?;
    let data: Vec<&str> = dims.iter().copied().filter(|dim| *dim != "tp").collect();
    let data = if data.is_empty() {
        None
    } else {
        Some(mesh.slice(data)?)
    };
    Ok((
        data,
        if run.is_tensor_parallel() {
            Some(mesh.slice("tp")?)
        } else {
            None
        },
    ))
}

/// PyTorch's `reshard_after_forward`.
pub fn reshard(raf: &Value) -> ReshardAfterForward {
    match raf {
        Value::Null => ReshardAfterForward::Auto,
        Value::Bool(true) => ReshardAfterForward::Always,
        Value::Bool(false) => ReshardAfterForward::Never,
        ranks => ReshardAfterForward::Ranks(ranks.as_u64().expect("a number of ranks") as usize),
    }
}

/// The run's element types. Outputs of the model are in single precision: losses are computed in
/// that. The MLP's are its last layer's.
fn mixed_precision(config: FullyShard, run: &Run) -> FullyShard {
    let Some((param, reduce)) = run
        .mp
        .as_ref()
        .map(|mp| mp.split_once('_').expect("two element types"))
    else {
        return config;
    };
    let dtype = |name| match name {
        "bf16" => DType::BF16,
        "fp32" => DType::F32,
        other => panic!("unknown element type {other}"),
    };
    let policy = MixedPrecisionPolicy::new()
        .with_param_dtype(dtype(param))
        .with_reduce_dtype(dtype(reduce));
    let full = policy.clone().with_output_dtype(DType::F32);
    match run.model.as_str() {
        "mlp" => config.with_mixed_precision(full),
        _ => config
            .with_mixed_precision(full)
            .with_mixed_precision_for(["layers.*"], policy),
    }
}

pub fn config(run: &Run) -> FullyShard {
    let reshard = run.raf.as_ref().map_or(ReshardAfterForward::Auto, reshard);
    let config = FullyShard::new()
        .with_units(["layers.*"])
        .with_reshard_after_forward(reshard);
    let config = mixed_precision(config, run);
    let ranks = run
        .mesh
        .as_ref()
        .and_then(|mesh| mesh.last().copied())
        .unwrap_or(1);
    match run.spf.as_deref() {
        None => config,
        Some("S1") => config.with_shard_placement_fn(|param: ParamInfo| {
            (param.shape.len() > 1).then_some(Placement::Shard(1))
        }),
        Some("S1even") => config.with_shard_placement_fn(move |param: ParamInfo| {
            (param.shape.len() > 1 && param.shape[1].is_multiple_of(ranks))
                .then_some(Placement::Shard(1))
        }),
        Some(other) => panic!("unknown shard-placement function {other}"),
    }
}
