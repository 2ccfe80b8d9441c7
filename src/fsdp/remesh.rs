//! [`remesh`]: moves a sharded model to another mesh without communication.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::DType;
use itertools::Itertools;

use super::FsdpError;
use super::config::FullyShard;
use super::shard::data_parallel;
use crate::Result;
use crate::comm::Group;
use crate::mesh::DeviceMesh;
use crate::param::{
    CpuOffload, DataParallelGroups, DistributedParameter, FsdpMeshInfo, ModelScan, ScannedParam,
    ShardAssignment, UnitName, UnitParam, attach_shards, data_spec, make_units,
};

/// Moves a model that [`fully_shard`](super::fully_shard) sharded to another mesh, on which every
/// rank holds the same shards as before. The ranks that survive a failure
/// ([`World::shrink`](crate::comm::World::shrink)) use it to continue.
///
/// Shards stay where they are; no data is sent. So the new mesh must shard over the same number of
/// ranks, and each rank must keep its position among them. The number of replicas may change. In a
/// 2-D mesh, the dimension with the name of the former shard dimension shards, or else the second
/// one. State of an abandoned step is dropped: gathered weights, gradients, and collectives in
/// flight. The optimizer's state belongs to the shards and stays valid. Units have their initial
/// options: set those of [`FsdpModule`](super::FsdpModule) once more.
///
/// ```no_run
/// # use burn_dtensor::prelude::*;
/// # use burn_dtensor::fsdp::remesh;
/// # type Model = burn::nn::Linear;
/// # type Step = fn(&Model, &DeviceMesh) -> burn_dtensor::Result<Model>;
/// # fn train(step: Step, mut model: Model, mut mesh: DeviceMesh) -> burn_dtensor::Result<()> {
/// loop {
///     match step(&model, &mesh) {
///         Ok(stepped) => model = stepped,
///         Err(_) => {
///             let world = mesh.world().shrink()?;
///             // Keeps the replicas that have not lost a shard.
///             mesh = mesh.survivors(&world, 0)?;
///             model = remesh(model, &mesh)?;
///         }
///     }
/// }
/// # }
/// ```
///
/// Local: no communication. Every rank of the new mesh must call it, because units draw numbers.
///
/// # Errors
/// [`FsdpError::MeshDims`] and [`FsdpError::IncompatibleMesh`] for a mesh that shards differently,
/// [`FsdpError::Parallelized`] for a parameter that is tensor-parallel as well,
/// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember) on a rank outside the mesh,
/// [`ParamError::Replaced`](crate::param::ParamError::Replaced) if a parameter was replaced after
/// `fully_shard`.
pub fn remesh<M: Module>(model: M, mesh: &DeviceMesh) -> Result<M> {
    if !(1..=2).contains(&mesh.ndim()) {
        return Err(FsdpError::MeshDims {
            mesh: mesh.to_string(),
        }
        .into());
    }
    let scan = ModelScan::of(&model);
    scan.check_not_replaced()?;
    let sharded = scan.params.into_iter().filter_map(RemeshedParam::of);
    // Grouped by the unit and not by its module, because several calls may have made several units
    // of one module.
    let units = sharded
        .enumerate()
        .into_group_map_by(|(_, param)| Arc::as_ptr(&param.before.unit));
    let mut attachments = Vec::new();
    // Every rank creates the units in the same order, because they draw numbers.
    for params in units.into_values().sorted_by_key(|params| params[0].0) {
        let (places, params): (Vec<_>, Vec<_>) = params.into_iter().unzip();
        let before = params[0].before.unit.clone();
        let data = data(&params[0].before, mesh)?;
        let mesh = &data.mesh;
        let modules: Vec<_> = params.iter().map(|param| param.module.clone()).collect();
        let units = UnitName::regrouped(before.comm.is_group(), &modules);
        let params = units
            .into_iter()
            .zip(params)
            .map(|(unit, param)| Ok(((unit, ()), param.on(mesh)?)));
        let params = params.collect::<Result<_>>()?;
        let made = make_units(params, |_, ()| Some(data.clone()))?;
        made.iter()
            .for_each(|param| param.unit.comm.join(&before.comm));
        attachments.extend(places.into_iter().zip(made));
    }
    attachments.sort_by_key(|(place, _)| *place);
    let attachments = attachments.into_iter().map(|(_, param)| ShardAssignment {
        param,
        gathered: None,
        data_specs: Vec::new(),
        copies: None,
        again: true,
    });
    attach_shards(model, attachments, false, "remesh")
}

/// A sharded parameter that is moved to another mesh.
struct RemeshedParam {
    path: String,
    dtype: DType,
    /// Path of its unit's module.
    module: String,
    before: DistributedParameter,
}

impl RemeshedParam {
    fn of(found: ScannedParam) -> Option<Self> {
        let path = found.path();
        let dtype = found.dtype;
        let module = found
            .module(found.distributed.as_ref()?)
            .unwrap_or_default();
        Some(Self {
            path,
            dtype,
            module,
            before: found.distributed?,
        })
    }

    /// Returns the parameter's description on `mesh`.
    fn on(self, mesh: &FsdpMeshInfo) -> Result<UnitParam> {
        let info = self.before.info();
        if info.parallel.is_some() {
            return Err(FsdpError::Parallelized { param: self.path }.into());
        }
        let spec = data_spec(mesh, info.sharding().as_ref(), &info.shape(), self.dtype)?.shared();
        Ok(UnitParam {
            path: self.path.into(),
            sharding_dim: mesh.sharding_dim(&spec),
            spec,
            ..info.clone()
        })
    }
}

/// Returns the groups on `mesh` of the unit of `before`, after checking that this rank's shards
/// there are those that it holds.
fn data(before: &DistributedParameter, mesh: &DeviceMesh) -> Result<DataParallelGroups> {
    let unit = &before.unit;
    let data = unit
        .spec()
        .data
        .as_ref()
        .ok_or_else(|| FsdpError::Parallelized {
            param: before.info().path.to_string(),
        })?;
    let shard = mesh
        .names()
        .iter()
        .position(|name| name == data.mesh.shard_name())
        .unwrap_or(mesh.ndim() - 1);
    let mesh = &FsdpMeshInfo {
        mesh: mesh.clone(),
        shard,
    };
    let was = data.shard.group();
    let is = mesh.shard_group()?.group();
    if (was.rank(), was.size()) != (is.rank(), is.size()) {
        let shard = |group: &Group| format!("{} of {}", group.rank(), group.size());
        let unit = unit.label().to_string();
        let mesh = mesh.mesh.to_string();
        return Err(FsdpError::IncompatibleMesh {
            unit,
            mesh,
            was: shard(was),
            is: shard(is),
        }
        .into());
    }
    let config = FullyShard::new()
        .with_reshard_after_forward(data.reshard)
        .with_buffer_sync(data.buffer_sync);
    let config = config
        .with_replica_check_every(data.verify.every)
        .with_weight_check(data.verify.stored);
    let config = FullyShard {
        implicit_unshard: data.implicit_unshard,
        forward_sync_buffers: data.forward_sync_buffers,
        refuses_unused: data.refuses_unused,
        ..config
    };
    let all = mesh.mesh.all()?;
    let groups = data_parallel(
        mesh,
        &all,
        &config,
        data.ignored.clone(),
        &data.model.origin,
    )?;
    let offloaded = data
        .offloaded
        .as_ref()
        .map(|_| CpuOffload::of(&groups.shard));
    Ok(DataParallelGroups {
        precision: data.precision,
        offloaded,
        buckets: data.buckets.as_ref().map(|buckets| buckets.successor()),
        ..groups
    })
}
