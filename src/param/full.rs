//! [`full_model`] and [`full_model_on`]: a plain burn module out of a distributed one.

use std::sync::Arc;

use burn::module::Module;
use itertools::Itertools;

use super::ParamError;
use super::adapter;
use super::buffers::{sync_buffers, unshared};
use super::read::open_gathered;
use super::replaced::check_not_replaced;
use super::shards::LocalShards;
use super::visit::{Visited, walk};
use crate::Result;

/// Gathers every parameter and returns the ordinary module, with no trace of sharding.
///
/// One all-gather per unit; of a unit that is only partly in `model`, just those parameters. Then one
/// for each of its parameters that is sharded over tensor-parallel ranks. Before them comes
/// [`sync_buffers`], which makes running statistics equal on all ranks, also those of `model`. The result
/// holds the whole model on every rank, and shares nothing that a forward writes; for a model that only one rank has
/// the memory for, see [`full_model_on`]. Weights with adapters (LoRA) are burn's own again, with
/// burn's adapters; those of ignored weights are merged into them. Ids, mappers,
/// devices and training state are kept, so it saves, loads and trains as if it had never been sharded; parameters that
/// were [offloaded](crate::fsdp::FullyShard::with_offload) are on the CPU.
///
/// # Collective
/// Every rank of the model's meshes must call it.
///
/// # Errors
/// [`ParamError::Replaced`](super::ParamError::Replaced) if a parameter was replaced after it was distributed;
/// [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn full_model<M: Module>(model: &M) -> Result<M> {
    let walk = walk(model);
    check_not_replaced(model, &walk)?;
    sync_buffers(model)?;
    unshared(gathered(model, walk.distributed, true)?.expect("it stays on every rank"))
}

/// [`full_model`] on one rank, such as to save it there; `None` on the others, of which each holds no more
/// than one unit at a time.
///
/// The same collectives as [`full_model`]'s.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn_dtensor::fsdp::full_model_on;
/// use burn_dtensor::prelude::*;
///
/// # let file = std::env::temp_dir().join(format!("full_model_on-{}", std::process::id()));
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let model = fully_shard(LinearConfig::new(4, 4).init(world.device()), &mesh, FullyShard::new())?;
///     if let Some(full) = full_model_on(&model, 0)? {
///         full.save_file(&file)?;
///     }
///     Ok(())
/// })?;
/// # std::fs::remove_file(file.with_extension("bpk"))?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// # Collective
/// Every rank of the model's meshes must call it.
///
/// # Errors
/// [`ParamError::NotSharded`] for a model without distributed parameters, which every rank has already,
/// [`ParamError::Replaced`] as [`full_model`], [`ParamError::NotOfMesh`] if `rank`, a global one, is not of their mesh,
/// and [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn full_model_on<M: Module>(model: &M, rank: usize) -> Result<Option<M>> {
    let walk = walk(model);
    check_not_replaced(model, &walk)?;
    let mut meshes = walk.distributed.iter().map(|visited| visited.param.info().spec.mesh());
    let first = meshes.next().ok_or(ParamError::NotSharded)?.clone();
    if ![&first].into_iter().chain(meshes).any(|mesh| mesh.ranks().contains(&rank)) {
        return Err(ParamError::NotOfMesh { rank, mesh: first.to_string() }.into());
    }
    sync_buffers(model)?;
    gathered(model, walk.distributed, first.rank() == rank)?.map(unshared).transpose()
}

/// The ordinary module, where it is to `stay`. Gathers unit by unit, and lets go of each at once elsewhere.
///
/// # Errors
/// That of a collective.
fn gathered<M: Module>(model: &M, visited: Vec<Visited>, stay: bool) -> Result<Option<M>> {
    let by_unit = |visited: &Visited| Arc::as_ptr(&visited.param.unit);
    // Units in the order of the model: addresses differ from rank to rank.
    let order = visited.iter().map(by_unit).unique().collect_vec();
    let mut groups = visited.into_iter().into_group_map_by(by_unit);
    let mut open = Vec::new();
    for key in order {
        let params = groups.remove(&key).expect("every unit has a group");
        let shard = |Visited { param, base, .. }: &Visited| (param.index, param.state.clone(), base.clone());
        let shards = LocalShards::new(params.iter().map(shard));
        let unit = open_gathered(&params[0].param.unit, shards)?;
        for Visited { param, base, read, .. } in params {
            read(&param, base)?;
        }
        open.extend(stay.then_some(unit));
    }
    Ok(stay.then(|| {
        let (model, adapters) = adapter::take(model.clone());
        let factors = adapters.into_iter().map(|(path, adapter)| (path, adapter.materialize()));
        let factors = factors.collect();
        adapter::put_burns(model.materialize(), factors)
    }))
}
