//! Copies of a sharded model that share no state with it.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::DType;
use itertools::Itertools;

use crate::Result;
use crate::dtensor::DTensorSpec;
use crate::fsdp::config::FullyShard;
use crate::fsdp::shard::data_parallel;
use crate::mesh::DeviceMesh;
use crate::param::{
    CpuOffload, DataParallelGroups, DistributedParameter, FsdpMeshInfo, ModelScan,
    ReshardAfterForward, ShardAssignment, UnitName, UnitParam, attach_shards, data_spec,
    make_units, unshared,
};
use crate::placement::ShardSizes;

/// Returns a copy with the same shards, in units of its own, with the initial options. Buffers are
/// private.
///
/// Local: no communication. It must be called on all ranks, because units draw numbers.
pub(super) fn sharded<M: Module>(model: &M) -> Result<M> {
    let groups = |data: &DataParallelGroups, origin: &Arc<str>| {
        let config = config(data).with_reshard_after_forward(data.reshard);
        let groups = data_parallel(&data.mesh, &data.all, &config, data.ignored.clone(), origin)?;
        let offloaded = data
            .offloaded
            .as_ref()
            .map(|_| CpuOffload::of(&groups.shard));
        Ok(DataParallelGroups {
            precision: data.precision,
            offloaded,
            ..groups
        })
    };
    rebuild(unshared(model.clone())?, groups, |before, _, _| {
        Ok((before.info().clone(), Vec::new()))
    })
}

/// Returns a copy that this rank holds in full, or in full except for tensor-parallel placements.
/// Its units have the same paths and policies, in a group of this rank alone.
///
/// # Collective
/// Every rank of the model's meshes.
pub(super) fn full<M: Module>(model: &M) -> Result<M> {
    let groups = |data: &DataParallelGroups, origin: &Arc<str>| {
        let world = data.mesh.mesh.world();
        let alone = world.group(&[world.rank()])?;
        let mesh = DeviceMesh::from_group(world, alone.clone(), data.mesh.shard_name())?;
        let config = config(data).with_reshard_after_forward(ReshardAfterForward::Never);
        let mesh = FsdpMeshInfo { mesh, shard: 0 };
        let groups = data_parallel(&mesh, &alone, &config, data.ignored.clone(), origin)?;
        Ok(DataParallelGroups {
            precision: data.precision,
            ..groups
        })
    };
    let place = |before: &DistributedParameter, dtype: DType, mesh: &FsdpMeshInfo| {
        let info = before.info();
        let shape = info.shape();
        let sharding = info
            .sharding()
            .map(|(dim, _)| (dim, ShardSizes::Chunked(shape[dim])));
        let alone = data_spec(mesh, sharding.as_ref(), &shape, dtype)?.shared();
        let tensor = info
            .parallel
            .as_ref()
            .map(|parallel| parallel.spec.in_dtype(dtype));
        let spec = tensor.clone().unwrap_or_else(|| alone.clone());
        // The mesh is one rank: no tensor-parallel spec is sharded over it.
        Ok((
            UnitParam {
                sharding_dim: mesh.sharding_dim(&spec),
                spec,
                ..info.clone()
            },
            tensor.into_iter().chain([alone]).collect(),
        ))
    };
    rebuild(unshared(model.clone())?, groups, place)
}

/// Returns the options of the `fully_shard` call with which units were made, except
/// `reshard_after_forward`.
fn config(data: &DataParallelGroups) -> FullyShard {
    let config = FullyShard::new().with_buffer_sync(data.buffer_sync);
    FullyShard {
        buckets: data.buckets.as_ref().map(|buckets| buckets.sizes()),
        ..config.with_implicit_unshard(data.implicit_unshard)
    }
}

/// Puts the data-parallel parameters into new units. `groups` returns a unit's groups. `place`
/// returns a parameter's description on the new mesh, and the shardings by which its gathered value
/// is placed; none if its shard stays.
fn rebuild<M: Module>(
    model: M,
    groups: impl Fn(&DataParallelGroups, &Arc<str>) -> Result<DataParallelGroups>,
    place: impl Fn(
        &DistributedParameter,
        DType,
        &FsdpMeshInfo,
    ) -> Result<(UnitParam, Vec<Arc<DTensorSpec>>)>,
) -> Result<M> {
    let params = ModelScan::of(&model)
        .params
        .into_iter()
        .filter_map(|found| {
            let before = found
                .distributed
                .clone()
                .filter(DistributedParameter::is_data_parallel)?;
            let module = found.module(&before).unwrap_or_default();
            Some((found.path(), module, found.dtype, before))
        });
    let units = params
        .enumerate()
        .into_group_map_by(|(_, (.., before))| Arc::as_ptr(&before.unit));
    let mut root: Option<Arc<str>> = None;
    let mut attachments = Vec::new();
    // Every rank creates the units in the same order, because they draw numbers.
    for params in units.into_values().sorted_by_key(|params| params[0].0) {
        let unit = params[0].1.3.unit.clone();
        let data = unit.spec().sharded_data();
        // A model is identified by the address of its origin. The copy has another one, so that its
        // backward does not reduce gradients that wait in the units of the program's model.
        let root = root.get_or_insert_with(|| Arc::from(&*data.model.origin));
        let data = groups(data, root)?;
        let modules: Vec<_> = params
            .iter()
            .map(|(_, (_, module, ..))| module.clone())
            .collect();
        let names = UnitName::regrouped(unit.comm.is_group(), &modules);
        let mut places = Vec::new();
        let mut members = Vec::new();
        for (name, (at, (path, _, dtype, before))) in names.into_iter().zip(params) {
            let (param, data_specs) = place(&before, dtype, &data.mesh)?;
            members.push((
                (name, ()),
                UnitParam {
                    path: path.into(),
                    ..param
                },
            ));
            places.push((at, (!data_specs.is_empty()).then_some(before), data_specs));
        }
        let made = make_units(members, |_, ()| Some(data.clone()))?;
        for ((at, gathered, data_specs), param) in places.into_iter().zip(made) {
            attachments.push((
                at,
                ShardAssignment {
                    param,
                    gathered,
                    data_specs,
                    copies: None,
                    again: true,
                },
            ));
        }
    }
    attachments.sort_by_key(|(at, _)| *at);
    attach_shards(
        model,
        attachments.into_iter().map(|(_, attachment)| attachment),
        false,
        "compare",
    )
}
