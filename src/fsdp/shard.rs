//! [`fully_shard`]: shards the parameters of a module over the ranks of a mesh.

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
use super::warnings::warn_about;
use crate::burn_compat::take_adapters;
use crate::comm::Communicator;
use crate::mesh::DeviceMesh;
use crate::param::{
    BACKWARD_GATHER, Buckets, CpuOffload, DataParallelGroups, FsdpMeshInfo, ModelNumbers,
    OffloadPolicy, Precision, REDUCE, ReplicaCheck, ReshardAfterForward, ShardAssignment, UnitName,
    UnitParam, attach_drawn, check_specs, combine, data_spec, make_units, move_other_params,
    own_buffers,
};
use crate::pattern::PathPattern;
use crate::placement::PlacementError;
use crate::{Error, Result};

/// Shards the parameters of any burn module over the ranks of `mesh`.
///
/// The model's type does not change. Each parameter becomes this rank's shard. Reading it
/// (`param.val()`, as every layer does) returns the full parameter, gathered with its unit.
/// [`unit`](fn@super::unit) describes when it is gathered, [`FullyShard`] the options.
///
/// A 1-D mesh shards over its dimension: placements `[S(0)]`. A 2-D mesh replicates over the first
/// dimension and shards over the second (HSDP): `[R, S(0)]`. For a mesh with more dimensions, or in
/// another order, name them with [`with_shard_dims`](FullyShard::with_shard_dims) and
/// [`with_replicate_dims`](FullyShard::with_replicate_dims). The [module
/// page](super#meshes-of-several-dimensions) shows experts on a separate mesh. The values are those
/// of the mesh's first rank.
///
/// **Lazy parameters.** burn's layers initialize their parameters on first use. Of such parameters,
/// only the mesh's first rank draws random numbers: one parameter after another, in the model's
/// order. Each is sent to the other ranks before the next is drawn. So no rank ever holds more than
/// one full parameter, and the values are those that a run on one device draws with the same seed.
/// If the program keeps a clone of the model, the clone keeps the values in memory too, because
/// clones share initialized values in burn.
///
/// **Stored shapes.** Code that reads the stored value sees the shard. Examples are burn's
/// `{model}` and `num_params`; [`describe`](super::describe) shows full shapes. A user-defined
/// layer that reads `self.weight.dims()` silently computes with other numbers, for instance in a
/// scale of `1 / sqrt(d)`. Let it read `self.weight.val().dims()`, or place the parameter as
/// `Replicate`. [`FullyShard::with_shard_placement_fn`] lists burn's own layers that read stored
/// shapes; they are handled.
///
/// **Buffers** (running statistics, int and bool parameters) also become those of the mesh's first
/// rank. Clones do not share them afterwards, so the program may build one model before `launch`
/// and clone it on every rank. In training, each rank's running statistics follow its own batches.
/// [`sync_buffers`](super::sync_buffers) makes them equal by the policy of
/// [`FullyShard::with_buffer_sync`]; call it before `valid()` and before writing a record.
/// [`full_model`](super::full_model) does so itself. Tensors in fields that are not a `Param`
/// remain different on each rank.
///
/// **Nested calls.** Modules sharded by an earlier call keep their units: shard inner modules
/// first, then the model.
///
/// **Replacing parameters.** Replace parameters before this call, or in the [full
/// model](super::full_model), and then shard that. A parameter is trained by each rank alone if the
/// program assigns it afterwards (`model.head = LinearConfig::new(4, 2).init(&device)`), or makes
/// it with a method of the old one (`map`, `set_require_grad`; the methods of the module are
/// correct). The next [`unit`](fn@super::unit) around it, and every function that receives the
/// model, then fails with an error. A forward without `unit`, and burn's optimizers, cannot detect
/// it.
///
/// **Records** contain this rank's shards. Each shard that is smaller than its parameter has a
/// marker of its position. So a record loads on ranks that hold the same shards, such as replicas.
/// On any other rank, burn's error names the missing shard. An optimizer's record has no such
/// marker.
///
/// **Tensor parallelism.** If the model is also [`parallelized`](crate::parallel::parallelize),
/// before or after this call, each rank's tensor-parallel shard is sharded further, and units
/// transfer only that. `mesh` and the tensor-parallel mesh must be slices of one mesh. The units
/// are those of this call's patterns.
///
/// **Optimizers.** An optimizer that works element by element, such as AdamW, steps shards exactly
/// as it would step full parameters. One that needs full parameters (Muon, LAMB, Adafactor, LBFGS)
/// sees shards, and so does burn's clipping by norm. [`sharded`](crate::optim::sharded) accepts
/// only the first kind at compile time, and has a correct Muon. Clip with
/// [`clip_grad_norm`](super::clip_grad_norm). The [table](super#optimizers) lists all optimizers.
///
/// **LoRA.** Weights with [`Lora`](burn::module::Lora) are sharded together with their adapters,
/// and stay frozen. `weight.lora.a` and `weight.lora.b` are parameters of the unit, and
/// `param.val()` is the same as without sharding. Apply LoRA before this call: on a sharded module
/// burn would keep the shards and drop the adapters. burn does not expose other
/// reparameterizations. Merge them, or ignore such weights with
/// `FullyShard::new().with_ignored(["**.weight"])`: each rank then keeps the full stored values,
/// and the parameters attached to them are sharded.
///
/// # Collective
/// Every rank of the mesh must call it with an equal model and configuration. If the mesh is a
/// slice, every rank of the mesh from which it was sliced must call it, with the model of its
/// slice. Slices initialize lazy parameters one after another, starting with the first.
///
/// Ranks must shard several models in the same order, and run them in the same order. A unit's
/// collectives carry the number of its `fully_shard` call. Ranks whose numbers differ fail with
/// [`CommError::Mismatch`](crate::comm::CommError::Mismatch), which names both models. The same
/// happens if ranks run different clones of one model, after the parameters of one clone were
/// replaced. An operation that replaces parameters, such as a step or loading a record, must do so
/// on every rank that runs the clone.
///
/// # Errors
/// [`FsdpError`] and [`ParamError`](crate::param::ParamError) for a wrong mesh, pattern or
/// placement, before any value moves; [`MeshError`](crate::mesh::MeshError) for names of
/// dimensions; [`Error::Comm`](crate::Error::Comm) if another rank fails.
#[track_caller]
pub fn fully_shard<M: Module>(model: M, mesh: &DeviceMesh, config: FullyShard) -> Result<M> {
    let origin = origin::<M>("sharded", Location::caller());
    distribute(model, mesh, config, "fully_shard", &origin)
}

/// Distributes the parameters of a model as [`fully_shard`] does, for the call `name` of this
/// [`origin`].
pub(crate) fn distribute<M: Module>(
    model: M,
    mesh: &DeviceMesh,
    config: FullyShard,
    name: &'static str,
    origin: &Arc<str>,
) -> Result<M> {
    let mut dims = FsdpMeshDims::new(mesh, &config)?;
    let ShardingPlan {
        params: mut planned,
        adopted,
        ignored,
        precisions,
        offloads,
        lazy,
        adapted,
        layers,
    } = plan(&model, mesh, &config, &mut dims)?;
    if config.balanced {
        balance(&mut planned, dims.meshes());
    }
    let all = dims.all()?;
    let others = dims.others()?;
    let data = dims
        .meshes()
        .map(|mesh| data_parallel(mesh, &all, &config, ignored.clone(), origin));
    let data: Vec<_> = data.collect::<Result<_>>()?;
    let data_specs = planned.iter().map(|param| {
        let mesh = &data[param.data].mesh;
        let sharding = data_spec(mesh, param.sharding.as_ref(), &param.shape, param.dtype);
        Ok(sharding
            .map_err(|error| named(param, mesh, error))?
            .shared())
    });
    let data_specs: Vec<_> = data_specs.collect::<Result<_>>()?;
    let params = planned
        .into_iter()
        .zip(&data_specs)
        .map(|(param, sharding)| {
            let spec = match &param.parallel {
                None => sharding.clone(),
                Some(parallel) => {
                    let mesh = &data[param.data].mesh;
                    let combined = combine(mesh, param.sharding.as_ref(), &parallel.spec);
                    combined
                        .map_err(|error| named(&param, mesh, error))?
                        .shared()
                }
            };
            let sharding_dim = data[param.data].mesh.sharding_dim(&spec);
            let PlannedParam {
                path,
                data,
                unit,
                depth,
                parallel,
                ..
            } = param;
            let compute = precisions.of(&unit).compute(&path);
            Ok((
                (unit, data),
                UnitParam {
                    path: path.into(),
                    depth,
                    spec,
                    sharding_dim,
                    parallel,
                    compute,
                },
            ))
        });
    let of_unit = |unit: &UnitName, &at: &usize| {
        let offloaded =
            (*offloads.of(unit) == OffloadPolicy::Cpu).then(|| CpuOffload::of(&data[at].shard));
        Some(DataParallelGroups {
            precision: precisions.of(unit).precision(),
            offloaded,
            ..data[at].clone()
        })
    };
    let params = make_units(params.collect::<Result<_>>()?, of_unit)?;
    check_specs(params.iter(), name)?;
    // All checks have passed. Units change only now: clones of the model share them, and a failing
    // call must not affect the clones.
    for (unit, path) in adopted {
        unit.comm.adopt(path, origin);
    }
    let units: Vec<_> = params.iter().map(|param| param.unit.clone()).collect();
    let sharded: HashSet<_> = params
        .iter()
        .map(|param| param.info().path.clone())
        .collect();
    let (model, mut adapters) = take_adapters(model, adapted, |path| sharded.contains(path));
    let attachments = params.into_iter().zip(data_specs).map(|(param, sharding)| {
        let UnitParam { path, parallel, .. } = param.info();
        let copies = others.clone().filter(|_| parallel.is_none());
        let again = parallel.is_some();
        let adapter = adapters.remove(&**path);
        let param = param.adapted(adapter);
        ShardAssignment {
            gathered: None,
            data_specs: vec![sharding],
            copies,
            again,
            param,
        }
    });
    let model = attach_drawn(model, attachments, mesh, lazy, name)?;
    let model = own_buffers(model, &units, &all, name)?;
    warn_about(&layers, origin, mesh, all.group().size(), &config);
    let is_offloaded = units.iter().any(|unit| unit.spec().offloaded().is_some());
    Ok(if is_offloaded {
        move_other_params(model, mesh.device())
    } else {
        model
    })
}

/// Returns the description of a model for messages: type, what was `done` with it, and source
/// location of the call, such as `Linear, sharded at src/main.rs:17`.
pub(crate) fn origin<M>(done: &str, place: &Location<'_>) -> Arc<str> {
    let path = type_name::<M>();
    let arguments = path.find('<').unwrap_or(path.len());
    let name = path[..arguments]
        .rfind("::")
        .map_or(path, |module| &path[module + 2..]);
    format!("{name}, {done} at {}:{}", place.file(), place.line()).into()
}

/// Creates the groups over which units on `mesh` are gathered and reduced, without mixed precision
/// and offload. `all` is the group of ranks that have distinct data.
pub(super) fn data_parallel(
    mesh: &FsdpMeshInfo,
    all: &Communicator,
    config: &FullyShard,
    ignored: Arc<[PathPattern]>,
    origin: &Arc<str>,
) -> Result<DataParallelGroups> {
    let FullyShard {
        reshard,
        implicit_unshard,
        buffer_sync,
        forward_sync_buffers,
        replica_check_every,
        weight_check,
        refuses_unused,
        buckets,
        ..
    } = *config;
    let shard = mesh.shard_group()?.clone();
    let replicate = mesh.replicate_group()?;
    let post_forward_group = match reshard {
        ReshardAfterForward::Ranks(ranks) => {
            let group = shard.group();
            if ranks == 0 || group.size() % ranks != 0 {
                let dim = mesh.shard_name().to_string();
                return Err(FsdpError::ReshardRanks {
                    ranks,
                    size: group.size(),
                    dim,
                }
                .into());
            }
            let first = group.rank() / ranks * ranks;
            Some(
                mesh.mesh
                    .world()
                    .group(&group.ranks()[first..first + ranks])?,
            )
        }
        _ => None,
    };
    let model = ModelNumbers::draw(
        origin.clone(),
        &shard,
        replicate,
        post_forward_group.as_ref(),
        all,
    );
    let replicate = replicate.map(|group| group.duplicate_private(REDUCE));
    let post_forward_group =
        post_forward_group.map(|group| group.duplicate_private(BACKWARD_GATHER));
    let verify = ReplicaCheck {
        every: replica_check_every,
        stored: weight_check,
        ..ReplicaCheck::default()
    }
    .into();
    let backward_gather = shard.duplicate_private(BACKWARD_GATHER);
    let reduce = shard.duplicate_private(REDUCE);
    let precision = Precision::default();
    Ok(DataParallelGroups {
        ignored,
        reshard,
        implicit_unshard,
        buffer_sync,
        forward_sync_buffers,
        precision,
        offloaded: None,
        verify,
        model,
        mesh: mesh.clone(),
        all: all.clone(),
        shard,
        backward_gather,
        reduce,
        replicate,
        post_forward_group,
        refuses_unused,
        buckets: buckets.map(Buckets::new),
    })
}

/// Adds the parameter to an error about shard sizes; returns other errors unchanged.
fn named(param: &PlannedParam, mesh: &FsdpMeshInfo, error: Error) -> Error {
    match (error, &param.sharding) {
        (
            Error::Placement(
                problem @ (PlacementError::ShardSizeCount { .. }
                | PlacementError::ShardSizeSum { .. }),
            ),
            Some((dim, _)),
        ) => {
            let mesh_dim = mesh.shard_name().to_string();
            FsdpError::InvalidShardSizes {
                param: param.path.clone(),
                dim: *dim,
                mesh_dim,
                problem,
            }
            .into()
        }
        (error, _) => error,
    }
}
