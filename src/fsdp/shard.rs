//! [`fully_shard`].

use std::any::type_name;
use std::collections::HashSet;
use std::panic::Location;
use std::sync::Arc;

use burn::module::Module;

use super::FsdpError;
use super::balance::balance;
use super::config::FullyShard;
use super::dims::FsdpMeshDims;
use super::plan::{PlannedParam, ShardingPlan, plan};
use crate::comm::Communicator;
use crate::mesh::DeviceMesh;
use crate::param::{
    AGAIN, CpuOffload, DataParallelGroups, FsdpMeshInfo, ModelNumbers, OffloadPolicy, Precision, REDUCE, ReplicaCheck,
    ReshardAfterForward, ShardAssignment, UnitName, UnitParam, attach_shards, combine, data_spec, in_turn, is_any_lazy,
    make_units, move_other_params, own_buffers, take_burns,
};
use crate::pattern::PathPattern;
use crate::placement::PlacementError;
use crate::{Error, Result};

/// Cuts the parameters of any burn module over the ranks of `mesh`.
///
/// The model's type does not change. Each parameter becomes this rank's shard; reading it
/// (`param.val()`, as every layer does) returns the whole, gathered with its unit. See
/// [`unit`](fn@super::unit) for when that happens, [`FullyShard`] for the choices.
///
/// A 1-D mesh shards over its dimension: placements `[S(0)]`. A 2-D mesh replicates over the first
/// and shards over the second (HSDP): `[R, S(0)]`. Of a mesh of more, or in another order,
/// [`with_shard_dims`](FullyShard::with_shard_dims) and [`with_replicate_dims`](FullyShard::with_replicate_dims) name
/// the dimensions; the [room's page](super#meshes-of-several-dimensions) has experts on a mesh of their own. Values are
/// those of the mesh's first rank.
///
/// Only that rank initializes parameters that are still lazy, as those of burn's layers are until something reads them;
/// the others draw no random numbers. It draws one after another, in the model's order, and each is sent on before the
/// next: no rank ever holds more than one whole parameter, and the values are those that a run on one device draws with
/// the same seed. A clone of the model that the program keeps would keep the values, too: burn's clones share what is
/// drawn.
///
/// What sees the stored value sees the shard: burn's `{model}` and `num_params`
/// ([`describe`](super::describe) shows the whole), and a layer of your own that asks for
/// `self.weight.dims()`, whose numbers are then silently others (a scale of `1 / sqrt(d)`). It asks the value,
/// `self.weight.val().dims()`, or the parameter is placed `Replicate`. burn's own layers that do are known to
/// [`FullyShard::with_shard_placement_fn`].
///
/// Buffers are that rank's too: running statistics, int and bool parameters. No clone shares them from then
/// on, so one model may be built before `launch` and cloned on every rank. In training each rank's running
/// statistics follow its own batches; [`sync_buffers`](super::sync_buffers) makes them equal again as
/// [`FullyShard::with_buffer_sync`] says, before `valid()` or a record, and [`full_model`](super::full_model) by
/// itself. Tensors in fields that are no `Param` stay each rank's own.
///
/// Modules sharded by an earlier call keep their units: shard inner modules first, then the model.
///
/// Parameters are replaced before, or in the [gathered](super::full_model) model, which is then sharded again. One
/// assigned afterwards (`model.head = LinearConfig::new(4, 2).init(&device)`), or made by a method of the old one
/// (`map`, `set_require_grad`; those of the module are right), is trained by each rank alone. The next
/// [`unit`](fn@super::unit) around it, and every function that is given the model, is an error; a forward without
/// `unit` and burn's optimizers cannot know.
///
/// Records hold this rank's shards, and of each that is less than its parameter which part it is: they load on ranks
/// that hold the same part, as replicas do, and burn's error names the part that is missing in any other. An
/// optimizer's record does not say whose it is.
///
/// Of a model that is also [`parallelized`](crate::parallel::parallelize), before or after, each rank's
/// tensor-parallel shard is cut once more, and units move nothing but that shard. `mesh` and the
/// tensor-parallel mesh must be slices of one mesh. The units are those of this call's patterns.
///
/// An optimizer that works element by element, such as AdamW, steps shards as it would the whole.
/// One that looks at a parameter as a whole (Muon, LAMB, Adafactor, LBFGS), and burn's clipping by
/// norm, sees a shard: [`sharded`](crate::optim::sharded) compiles with the first kind alone, and has Muon right. Clip
/// with [`clip_grad_norm`](super::clip_grad_norm). The [table](super#optimizers) has them all.
///
/// Weights with LoRA ([`Lora`](burn::module::Lora)) are sharded, frozen as they are, and their adapters with them:
/// `weight.lora.a` and `weight.lora.b` are parameters of the unit, and `param.val()` is what it is without sharding.
/// Apply LoRA first: of a module that is sharded already burn would keep the shards and drop the adapters. Any other
/// reparameterization burn shows nobody: such weights are ignored, `FullyShard::new().with_ignored(["**.weight"])`, so that
/// each rank keeps the values that it has, whole, and what is attached to them is sharded; or it is merged.
///
/// # Collective
/// Every rank of the mesh must call it with an equal model and configuration. If the mesh is a slice, so must every
/// rank of the mesh that it was sliced from, with the model of its own slice: slices initialize lazy parameters in
/// turn, the first of them first.
///
/// Ranks must shard several models in the same order, and run them so: a unit's collectives carry the number of its
/// call, and ranks whose numbers differ fail with [`CommError::Mismatch`](crate::comm::CommError::Mismatch), which
/// names both models. So do ranks that run different clones of one model, once the parameters of one were replaced.
/// What replaces parameters, such as a step or a record, must do so on every rank that runs the clone.
///
/// # Errors
/// [`FsdpError`] and [`ParamError`](crate::param::ParamError) for a wrong mesh, pattern or placement,
/// before any value moves;
/// [`MeshError`](crate::mesh::MeshError) for names of dimensions;
/// [`Error::Comm`](crate::Error::Comm) if another rank fails.
#[track_caller]
pub fn fully_shard<M: Module>(model: M, mesh: &DeviceMesh, config: FullyShard) -> Result<M> {
    let origin = origin::<M>(Location::caller());
    let mut dims = FsdpMeshDims::new(mesh, &config)?;
    let ShardingPlan { params: mut planned, adopted, ignored, precisions, offloads, lazy, adapted } =
        plan(&model, mesh, &config, &mut dims)?;
    if config.balanced {
        balance(&mut planned, dims.meshes());
    }
    let (all, others) = (dims.all()?, dims.others()?);
    let data = dims.meshes().map(|mesh| data_parallel(mesh, &all, &config, ignored.clone(), &origin));
    let data: Vec<_> = data.collect::<Result<_>>()?;
    let data_specs = planned.iter().map(|param| {
        let mesh = &data[param.data].mesh;
        let sharding = data_spec(mesh, param.sharding.as_ref(), &param.shape, param.dtype);
        Ok(sharding.map_err(|error| named(param, mesh, error))?.shared())
    });
    let data_specs: Vec<_> = data_specs.collect::<Result<_>>()?;
    let params = planned.into_iter().zip(&data_specs).map(|(param, sharding)| {
        let spec = match &param.parallel {
            None => sharding.clone(),
            Some(parallel) => {
                let mesh = &data[param.data].mesh;
                let combined = combine(mesh, param.sharding.as_ref(), &parallel.spec);
                combined.map_err(|error| named(&param, mesh, error))?.shared()
            }
        };
        let PlannedParam { path, shape, sharding, data, unit, depth, parallel, .. } = param;
        let compute = precisions.of(&unit).compute(&path);
        Ok(((unit, data), UnitParam { path: path.into(), depth, shape, sharding, spec, parallel, compute }))
    });
    let of_unit = |unit: &UnitName, &at: &usize| {
        let offloaded = (*offloads.of(unit) == OffloadPolicy::Cpu).then(|| CpuOffload::of(&data[at].shard));
        Some(DataParallelGroups { precision: precisions.of(unit).precision(), offloaded, ..data[at].clone() })
    };
    let params = make_units(params.collect::<Result<_>>()?, of_unit)?;
    // Nothing is wrong with this call: clones of the model may have kept the units as they were.
    for (unit, path) in adopted {
        unit.adopt(path, &origin);
    }
    let units: Vec<_> = params.iter().map(|param| param.unit.clone()).collect();
    let sharded: HashSet<_> = params.iter().map(|param| param.info().path.clone()).collect();
    let (model, mut adapters) = take_burns(model, adapted, |path| sharded.contains(path));
    let attachments = params.into_iter().zip(data_specs).map(|(param, sharding)| {
        let UnitParam { path, parallel, .. } = param.info();
        let copies = others.clone().filter(|_| parallel.is_none());
        let (path, again) = (path.clone(), parallel.is_some());
        let param = param.adapted(adapters.remove(&*path));
        ShardAssignment { path, gathered: None, data_specs: vec![sharding], copies, again, param }
    });
    let lazy = is_any_lazy(mesh, "fully_shard", lazy)?;
    let place = || attach_shards(model, attachments, lazy, "fully_shard");
    let model = if lazy { in_turn(mesh, "fully_shard, in turn", place)? } else { place()? };
    let model = own_buffers(model, &units, &all, "fully_shard")?;
    let is_offloaded = units.iter().any(|unit| unit.offloaded().is_some());
    Ok(if is_offloaded { move_other_params(model, mesh.device()) } else { model })
}

/// Returns what messages say of a model of type `M` that was sharded there: `Linear, sharded at src/main.rs:17`.
fn origin<M>(place: &Location<'_>) -> Arc<str> {
    let path = type_name::<M>();
    let arguments = path.find('<').unwrap_or(path.len());
    let name = path[..arguments].rfind("::").map_or(path, |module| &path[module + 2..]);
    format!("{name}, sharded at {}:{}", place.file(), place.line()).into()
}

/// The groups over which units on `mesh` are gathered and reduced, in the element types that things have, where `all`
/// ranks have data of their own.
pub(super) fn data_parallel(
    mesh: &FsdpMeshInfo,
    all: &Communicator,
    config: &FullyShard,
    ignored: Arc<[PathPattern]>,
    origin: &Arc<str>,
) -> Result<DataParallelGroups> {
    let FullyShard { reshard, implicit_unshard, buffer_sync, replica_check_every, .. } = *config;
    let (shard, replicate) = (mesh.shard_group()?.clone(), mesh.replicate_group()?);
    let post_forward_group = match reshard {
        ReshardAfterForward::Ranks(ranks) => {
            let group = shard.group();
            if ranks == 0 || group.size() % ranks != 0 {
                let dim = mesh.shard_name().to_string();
                return Err(FsdpError::ReshardRanks { ranks, size: group.size(), dim }.into());
            }
            let first = group.rank() / ranks * ranks;
            Some(mesh.mesh.world().group(&group.ranks()[first..first + ranks])?)
        }
        _ => None,
    };
    let model = ModelNumbers::draw(origin.clone(), &shard, replicate, post_forward_group.as_ref(), all);
    let replicate = replicate.map(|group| group.duplicate(REDUCE));
    let post_forward_group = post_forward_group.map(|group| group.duplicate(AGAIN));
    let verify = ReplicaCheck::every(replica_check_every).into();
    let (again, reduce) = (shard.duplicate(AGAIN), shard.duplicate(REDUCE));
    let precision = Precision::default();
    Ok(DataParallelGroups {
        ignored,
        reshard,
        implicit_unshard,
        buffer_sync,
        precision,
        offloaded: None,
        verify,
        model,
        mesh: mesh.clone(),
        all: all.clone(),
        shard,
        again,
        reduce,
        replicate,
        post_forward_group,
    })
}

/// The error of lengths that do not fit, with the parameter that they are for.
fn named(param: &PlannedParam, mesh: &FsdpMeshInfo, error: Error) -> Error {
    match (error, &param.sharding) {
        (
            Error::Placement(problem @ (PlacementError::ShardSizeCount { .. } | PlacementError::ShardSizeSum { .. })),
            Some((dim, _)),
        ) => {
            let mesh_dim = mesh.shard_name().to_string();
            FsdpError::InvalidShardSizes { param: param.path.clone(), dim: *dim, mesh_dim, problem }.into()
        }
        (error, _) => error,
    }
}
