//! [`full_model`] and [`full_model_on`]: convert a distributed model to an ordinary burn module.

use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use itertools::Itertools;

use super::ParamError;
use super::buffers::{sync_buffers, unshared};
use super::distributed::{DistributedParameter, take_adapters};
use super::read::{open_gathered, value};
use super::shards::LocalShards;
use super::visit::{Visited, Walk, check_not_replaced, walk};
use crate::Result;
use crate::burn_compat::put_adapters;

/// Gathers all parameters and returns an ordinary burn module that is no longer sharded.
///
/// [`sync_buffers`] runs first, and makes running statistics equal on all ranks, including those of
/// `model`. Then each unit runs one all-gather. If a unit is only partially in `model`, only its
/// parameters in `model` are gathered. One more all-gather runs for each parameter that is sharded
/// over tensor-parallel ranks.
///
/// The result contains the full model on every rank. It shares no tensor that a forward writes. If
/// only one rank has enough memory for the model, use [`full_model_on`]. Parameters with adapters
/// (LoRA) get burn's own adapters; adapters of ignored parameters are merged into them. Ids,
/// mappers, devices and training state are kept, so the result saves, loads and trains as if it had
/// never been sharded. [Offloaded](crate::fsdp::FullyShard::with_offload) parameters are on the
/// CPU.
///
/// # Collective
/// Every rank of the model's meshes must call it.
///
/// # Errors
/// [`ParamError::Replaced`](super::ParamError::Replaced) if a parameter was replaced after it was
/// distributed; [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn full_model<M: Module>(model: &M) -> Result<M> {
    Ok(full_model_if(model, true)?.expect("the model is returned if `stay` is true"))
}

/// Like [`full_model`], but returns the model only on one rank, for example to save it there. It
/// returns `None` on the other ranks, each of which holds at most one unit at a time.
///
/// The collectives are those of [`full_model`].
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
/// [`ParamError::NotSharded`] for a model without distributed parameters, which every rank has in
/// full; [`ParamError::Replaced`] as in [`full_model`]; [`ParamError::NotOfMesh`] if the global
/// rank `rank` is not in the mesh of the parameters; [`Error::Comm`](crate::Error::Comm) if another
/// rank fails.
pub fn full_model_on<M: Module>(model: &M, rank: usize) -> Result<Option<M>> {
    let walk = walk(model);
    check_not_replaced(model, &walk)?;
    let mut meshes = walk
        .distributed
        .iter()
        .map(|visited| visited.param.info().spec.mesh());
    let first = meshes.next().ok_or(ParamError::NotSharded)?.clone();
    if ![&first]
        .into_iter()
        .chain(meshes)
        .any(|mesh| mesh.ranks().contains(&rank))
    {
        return Err(ParamError::NotOfMesh {
            rank,
            mesh: first.to_string(),
        }
        .into());
    }
    gathered(model, walk, first.rank() == rank)
}

/// Like [`full_model`], but returns the model only on ranks with `stay`. A model without
/// distributed parameters is returned as it is.
///
/// # Collective
/// Every rank of the model's meshes must call it.
///
/// # Errors
/// Those of [`full_model`].
pub(crate) fn full_model_if<M: Module>(model: &M, stay: bool) -> Result<Option<M>> {
    let walk = walk(model);
    check_not_replaced(model, &walk)?;
    gathered(model, walk, stay)
}

/// Synchronizes the buffers, and gathers the parameters unit by unit. Returns the ordinary module
/// if `stay` is true; otherwise frees each unit at once.
///
/// # Errors
/// The error of a collective.
fn gathered<M: Module>(model: &M, walk: Walk, stay: bool) -> Result<Option<M>> {
    sync_buffers(model)?;
    let visited = walk.distributed;
    let by_unit = |visited: &Visited| Arc::as_ptr(&visited.param.unit);
    // Gather units in the order of the model: their addresses differ between ranks.
    let order = visited.iter().map(by_unit).unique().collect_vec();
    let mut groups = visited.into_iter().into_group_map_by(by_unit);
    let mut readers = Readers::default();
    model.visit(&mut readers);
    let mut open = Vec::new();
    for key in order {
        let params = groups
            .remove(&key)
            .expect("every unit in `order` has a group");
        let shards =
            LocalShards::new(params.iter().map(|Visited { param, base, .. }| {
                (param.index, param.state.clone(), base.clone())
            }));
        let unit = open_gathered(&params[0].param.unit, shards)?;
        for Visited {
            id, param, base, ..
        } in params
        {
            (readers.0[&id])(&param, base)?;
        }
        open.extend(stay.then_some(unit));
    }
    let ordinary = stay.then(|| {
        let (model, adapters) = take_adapters(model.clone());
        let adapters = adapters
            .into_iter()
            .map(|(path, adapter)| (path, adapter.materialize()));
        put_adapters(model.materialize(), adapters.collect())
    });
    ordinary.map(unshared).transpose()
}

/// Function that reads a parameter whose number of dimensions is erased.
type ReadFn = fn(&DistributedParameter, DispatchTensor) -> Result<()>;

/// A visitor that collects functions that read the model's parameters, each with the parameter's
/// number of dimensions.
#[derive(Default)]
struct Readers(HashMap<ParamId, ReadFn>);

impl ModuleVisitor for Readers {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.insert(param.id, |param, base| {
            value(param, Tensor::<D>::from_dispatch(base)).map(drop)
        });
    }
}
