//! Buffers: state of a model other than its float parameters, such as a batch norm's running
//! statistics.
//!
//! burn passes a `RunningState` to visitors and mappers as a float tensor, and writes it in place.
//! Clones of a model share it, and a forward writes to it. So when the model is distributed, each
//! rank gets a private copy with the first rank's value ([`own_buffers`]). Afterwards each rank has
//! the statistics of its own batches, until [`sync_buffers`] makes them equal. Int and bool
//! parameters also get the first rank's values. No operation changes them in place.
//!
//! A buffer belongs to the nearest parameter, and uses the groups over which that parameter is
//! distributed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::Module;

use super::distributed::DistributedParameter;
use super::distributed::copying;
use super::model_scan::{Buffer, ModelScan, ScannedParam};
use super::stored::{NewValue, Replace, settled, visit_stored};
use super::unit::Unit;
use super::unit_spec::DataParallelGroups;
use super::{BufferSync, ParamError};
use crate::Result;
use crate::burn_compat::{self, map_tensors};
use crate::comm::{Call, Communicator, ReduceOp, TensorMeta};

/// A buffer and the parameter whose groups it uses.
pub(super) struct BufferOwner {
    pub(super) path: String,
    /// True if the buffer is a `RunningState`.
    pub(super) running: bool,
    pub(super) param: DistributedParameter,
}

/// Returns the buffers of a distributed model that belong to a distributed parameter, in burn's
/// order.
///
/// A buffer belongs to the parameter with the longest common path prefix: the statistics of a batch
/// norm belong to its scale. If several parameters share that prefix, it is the first that is
/// distributed. If none of them is distributed, the buffer is not returned, and stays local like
/// those parameters.
///
/// ```text
///   stem.norm.gamma             stem.norm.running_mean      belongs to stem.norm.gamma
///   stem.conv.weight            head.counts                 belongs to head.weight
///   head.weight                 steps                       belongs to stem.norm.gamma
/// ```
pub(super) fn owners<M: Module>(model: &M) -> Vec<BufferOwner> {
    let ModelScan {
        params, buffers, ..
    } = ModelScan::of(model);
    // For each module path that contains parameters at any depth: the first of them that is
    // distributed, if any.
    let mut first: HashMap<&[String], Option<&DistributedParameter>> = HashMap::new();
    for ScannedParam {
        path, distributed, ..
    } in &params
    {
        for depth in 0..path.len() {
            let first = first.entry(&path[..depth]).or_default();
            *first = first.or(distributed.as_ref());
        }
    }
    let owner = |Buffer { path, running }: Buffer| {
        let param = (0..path.len())
            .rev()
            .find_map(|depth| first.get(&path[..depth]))
            .copied()
            .flatten()?
            .clone();
        Some(BufferOwner {
            path: path.join("."),
            running,
            param,
        })
    };
    buffers.into_iter().filter_map(owner).collect()
}

/// Makes a sharded model's running statistics equal on all ranks over which it was sharded,
/// according to its [`BufferSync`].
///
/// Call it before [`valid`](Module::valid), before you make a record of the model, and before other
/// code reads running statistics. [`full_model`](crate::fsdp::full_model) calls it. It does nothing
/// for a model that was not sharded or has no buffers. Ranks that differ only along a
/// tensor-parallel dimension compute on the same batch, so their statistics are equal anyway.
///
/// The statistics are written in place. The model's clones see them, but models that `valid`,
/// `train` or `full_model` made from it before do not.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{BatchNorm, BatchNormConfig};
/// use burn::tensor::Tensor;
/// use burn_dtensor::prelude::*;
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let device = world.device().clone().autodiff();
///     let norm: BatchNorm = BatchNormConfig::new(3).init(&device);
///     let norm = fully_shard(norm, &mesh, FullyShard::new().with_buffer_sync(BufferSync::Average))?;
///     // The ranks have different batches: all 0 on rank 0, all 1 on rank 1.
///     norm.forward(Tensor::<2>::full([4, 3], world.rank() as f32, &device));
///     sync_buffers(&norm)?;
///     let mean = norm.valid().running_mean.value();
///     assert_eq!(mean.into_data().try_to_vec::<f32>().unwrap(), [0.05; 3]); // momentum 0.1, of 0 and 1
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<_, LaunchError>(())
/// ```
///
/// # Collective
/// Every rank over which the model was sharded must call it. It runs one broadcast, or one
/// all-reduce, of all statistics.
///
/// # Errors
/// [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn sync_buffers<M: Module>(model: &M) -> Result<()> {
    let settled = settled(model);
    for SyncedBuffers { data, paths } in by_groups(owners(&settled)) {
        let values = read(&settled, &paths, true);
        let call = Call {
            model: Some(data.model_of_all()),
            ..Call::new("sync_buffers")
        };
        let values = match data.buffer_sync {
            BufferSync::FirstRank => {
                let first = data.all.group().rank() == 0;
                let metas = values.iter().map(meta).collect();
                data.all
                    .broadcast(call, first.then_some(values), metas, 0)
                    .wait()?
            }
            BufferSync::Average => data.all.all_reduce(call, values, ReduceOp::Avg).wait()?,
        };
        // The clone shares its running statistics with the model.
        write(model.clone(), paths, values);
    }
    Ok(())
}

/// Running statistics that were sharded over the same ranks and have the same policy.
struct SyncedBuffers {
    data: DataParallelGroups,
    paths: Vec<String>,
}

/// Groups the buffers, in the order of the model, which is the same on every rank.
fn by_groups(owners: Vec<BufferOwner>) -> Vec<SyncedBuffers> {
    let mut all: Vec<SyncedBuffers> = Vec::new();
    for BufferOwner { path, param, .. } in owners.into_iter().filter(|owner| owner.running) {
        let Some(data) = &param.unit.spec().data else {
            continue;
        };
        let same = |other: &DataParallelGroups| {
            other.all.group() == data.all.group() && other.buffer_sync == data.buffer_sync
        };
        match all.iter_mut().find(|synced| same(&synced.data)) {
            Some(synced) => synced.paths.push(path),
            None => all.push(SyncedBuffers {
                data: data.clone(),
                paths: vec![path],
            }),
        }
    }
    all
}

/// Returns a model that has just been distributed, with buffers that no clone of it shares. Buffers
/// that belong to a parameter of `units` have the values of the group's first rank.
///
/// `label` names the call.
///
/// # Collective
/// On every rank of the group. A model without buffers needs no communication.
///
/// # Errors
/// [`ParamError::ParamNotVisited`](crate::param::ParamError::ParamNotVisited) if `map` of a module
/// does not visit the same parameters as its `visit`, and [`Error::Comm`](crate::Error::Comm) if
/// ranks have different buffers or another rank fails.
pub(crate) fn own_buffers<M: Module>(
    model: M,
    units: &[Arc<Unit>],
    group: &Communicator,
    label: &'static str,
) -> Result<M> {
    let units: HashSet<_> = units.iter().map(Arc::as_ptr).collect();
    let of_units = |owner: &BufferOwner| units.contains(&Arc::as_ptr(&owner.param.unit));
    let model = unshared(model)?;
    let paths: Vec<_> = owners(&model)
        .into_iter()
        .filter(of_units)
        .map(|owner| owner.path)
        .collect();
    if paths.is_empty() {
        return Ok(model);
    }
    let first = group.group().rank() == 0;
    let values = read(&model, &paths, first);
    let metas = values.iter().map(meta).collect();
    let call = Call::new(format!("{label}, buffers"));
    let values = group
        .broadcast(call, first.then_some(values), metas, 0)
        .wait()?;
    Ok(write(model, paths, values))
}

/// Returns the model with private buffers. Everything else is unchanged, including lazy parameters,
/// except that plain tensors in fields are no longer on an autodiff device.
///
/// # Errors
/// [`ParamError::ParamNotVisited`] for a parameter that the model's `map` does not visit as its
/// `visit` does.
pub(crate) fn unshared<M: Module>(model: M) -> Result<M> {
    if !ModelScan::of(&model).has_running() {
        return Ok(model);
    }
    copying(|| burn_compat::renewed(model))
        .map_err(|param| ParamError::ParamNotVisited { param }.into())
}

/// Returns the plain values at `paths`, which are in burn's order.
///
/// Reading a lazy value initializes it. If `draw` is false, a lazy value is read as zeros instead.
pub(super) fn read<M: Module>(model: &M, paths: &[String], draw: bool) -> Vec<DispatchTensor> {
    let wanted: HashSet<_> = paths.iter().map(String::as_str).collect();
    visit_stored(model, draw, |path| wanted.contains(path))
        .into_iter()
        .map(|stored| stored.value)
        .collect()
}

/// Returns the model with these plain values at these paths. Running statistics are written in
/// place, so all clones of the model see them.
pub(super) fn write<M: Module>(model: M, paths: Vec<String>, values: Vec<DispatchTensor>) -> M {
    let values = paths
        .into_iter()
        .zip(
            values
                .into_iter()
                .map(|value| NewValue::Tensor(Box::new(value))),
        )
        .collect();
    copying(|| map_tensors(model, &mut Replace::new(values)))
}

/// Returns the shape and element type of a tensor that the other ranks will receive.
pub(super) fn meta(tensor: &DispatchTensor) -> TensorMeta {
    TensorMeta {
        shape: tensor.shape(),
        dtype: tensor.dtype(),
    }
}
