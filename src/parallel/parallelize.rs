//! [`parallelize`]: applies a plan to a model.

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::Module;

use super::Plan;
use super::after_fsdp::{TpAfterFsdp, apply_after_fsdp};
use super::resolve::{ParallelizedParam, resolve};
use super::style::LayerStyles;
use crate::Result;
use crate::dtensor::{DTensorSpec, MeshDims};
use crate::mesh::DeviceMesh;
use crate::param::{
    ModelScan, ShardAssignment, TpPlacement, UnitParam, attach_drawn, attach_shards, check_specs,
    make_units, own_buffers, sync_buffers,
};
use crate::placement::Layout;

/// Places the parameters of any burn module on the ranks of a tensor-parallel mesh.
///
/// The model's type does not change. Every parameter becomes a DTensor on `mesh`, which is usually
/// a slice (`mesh.slice("tp")?`), with the placement that the plan assigns, or `Replicate` by
/// default. On a mesh of several dimensions, the plan names the dimension of each entry
/// ([`Plan::with_mesh_dim_plan`]). Layers over [`DTensor`](crate::dtensor::DTensor) read a
/// parameter with [`param.dtensor()`](crate::fsdp::ParamExt::dtensor). burn's own layers compute
/// with the full parameter, identically on every rank. The optimizer updates this rank's shard,
/// with the restrictions described at [`fully_shard`](crate::fsdp::fully_shard).
///
/// Records contain this rank's shards, and can be loaded only where a rank holds the same shard.
/// Load a record of the full model before this call, and save one from
/// [`full_model`](crate::fsdp::full_model). If parameters must be replaced, do that before this
/// call too; see [`fully_shard`](crate::fsdp::fully_shard).
///
/// The values are those of the mesh's first rank, and only that rank initializes parameters that
/// are still lazy. Buffers, such as running statistics, are also taken from that rank, and clones
/// no longer share them afterwards. Shards may be uneven.
///
/// Together with [`fully_shard`](crate::fsdp::fully_shard), in either order, each rank's
/// tensor-parallel shard is also sharded over the data-parallel ranks. If the model is already
/// sharded, its units keep their modules, their ranks and their sharded dimensions; the placement
/// function has then seen the shapes of the full parameters, not of tensor-parallel shards. Such
/// parameters are gathered one after the other to apply the plan. If not even the tensor-parallel
/// shards of a model fit into memory, call `fully_shard` first. Parameters that are placed over
/// ranks with different data, such as [experts](crate::fsdp#meshes-of-several-dimensions), must be
/// parallelized first.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::prelude::*;
/// use burn_dtensor::prelude::*;
///
/// #[derive(Module, Debug)]
/// struct Mlp {
///     up: Linear,
///     down: Linear,
/// }
///
/// launch(Launch::threads(4), |world| {
///     let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
///     let device = world.device().clone().autodiff();
///     let mlp = Mlp { up: LinearConfig::new(8, 32).init(&device), down: LinearConfig::new(32, 8).init(&device) };
///     let plan = Plan::new().with_style("up", Style::colwise()).with_style("down", Style::rowwise());
///     let mlp = parallelize(mlp, &mesh.slice("tp")?, plan)?;
///     assert_eq!(mlp.up.weight.base().dims(), [8, 16]);
///     let mlp = fully_shard(mlp, &mesh.slice("dp")?, FullyShard::new())?;
///     assert_eq!(mlp.up.weight.base().dims(), [4, 16]);
///     assert_eq!(mlp.up.weight.dtensor()?.local().dims(), [8, 16]);
///     assert_eq!(mlp.up.weight.val().dims(), [8, 32]);
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// # Collective
/// Every rank of the mesh must call it with an equal model and plan. If the mesh is a slice, every
/// rank of the mesh from which it was sliced must call it, with the model of its own slice. Slices
/// initialize their parameters one after the other, in order, so that equal runs draw equal values.
/// If the model is already sharded, every rank of its meshes must call it.
///
/// # Errors
/// [`ParallelError`](super::ParallelError) and [`ParamError`](crate::param::ParamError) for a wrong
/// mesh or plan, before any value is moved; [`Error::Comm`](crate::Error::Comm) if another rank
/// fails.
pub fn parallelize<M: Module>(model: M, mesh: &DeviceMesh, plan: Plan) -> Result<M> {
    let scan = ModelScan::of(&model);
    let lazy = scan.params.iter().any(|found| found.lazy);
    let planned = resolve(&plan, scan, mesh)?;
    let mut sharded = Vec::new();
    let mut is_sharded = HashSet::new();
    let params = planned.into_iter().map(|param| {
        let ParallelizedParam {
            path,
            shape,
            dtype,
            sharded: before,
            styles,
            placements,
            modules,
            unit,
            depth,
        } = param;
        let layout = Layout::new(mesh.shape(), &placements)?;
        let spec = DTensorSpec::new(mesh, layout, shape.into(), dtype)?.shared();
        let layer = Arc::new(LayerStyles::new(styles, modules));
        let parallel = TpPlacement {
            spec: spec.clone(),
            layer,
            data_dims: MeshDims::new(),
        };
        if let Some((before, module)) = before {
            is_sharded.insert(path.clone());
            sharded.push(TpAfterFsdp {
                path: path.clone(),
                module,
                before,
                parallel: parallel.clone(),
            });
        }
        let path = path.into();
        let parallel = Some(parallel);
        Ok((
            (unit, ()),
            UnitParam {
                path,
                depth,
                spec,
                sharding_dim: None,
                parallel,
                compute: None,
            },
        ))
    });
    let params = make_units(params.collect::<Result<_>>()?, |_, ()| None)?;
    // Parameters that were sharded before are already initialized and have their own units.
    let params: Vec<_> = params
        .into_iter()
        .filter(|param| !is_sharded.contains(&*param.info().path))
        .collect();
    let again = apply_after_fsdp(sharded)?;
    check_specs(
        params
            .iter()
            .chain(again.iter().map(|attachment| &attachment.param)),
        "parallelize",
    )?;
    let attached = params
        .iter()
        .chain(again.iter().map(|attachment| &attachment.param));
    let units: Vec<_> = attached.map(|param| param.unit.clone()).collect();
    let attachments = params.into_iter().map(|param| {
        let data_specs = vec![param.info().spec.clone()];
        ShardAssignment {
            param,
            gathered: None,
            data_specs,
            copies: None,
            again: false,
        }
    });
    let all = mesh.all()?;
    if !again.is_empty() {
        sync_buffers(&model)?;
    }
    let model = attach_drawn(model, attachments, mesh, lazy, "parallelize")?;
    // Data-parallel ranks are in different slices, so their collectives come after the slices'
    // turns.
    let model = if again.is_empty() {
        model
    } else {
        attach_shards(model, again, true, "parallelize, sharded")?
    };
    own_buffers(model, &units, &all, "parallelize")
}
