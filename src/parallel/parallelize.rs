//! [`parallelize`].

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::Module;

use super::Plan;
use super::resolve::{ParallelizedParam, resolve};
use crate::Result;
use crate::dtensor::{DTensorSpec, MeshDims};
use crate::mesh::DeviceMesh;
use crate::param::{
    LayerStyles, ModelScan, ShardAssignment, TpAfterFsdp, TpPlacement, UnitParam, apply_tp_after_fsdp, attach_shards,
    in_turn, is_any_lazy, make_units, own_buffers, sync_buffers,
};
use crate::placement::Layout;

/// Places the parameters of any burn module on the ranks of a tensor-parallel mesh.
///
/// The model's type does not change. Every parameter becomes a DTensor on `mesh`, which is usually a slice
/// (`mesh.slice("tp")?`): placed as the plan says, or `Replicate` where it says nothing. For a mesh of several
/// dimensions the plan says for which of them each entry is ([`Plan::with_mesh_dim_plan`]). Layers over
/// [`DTensor`](crate::dtensor::DTensor) read it by [`param.dtensor()`](crate::fsdp::ParamExt::dtensor); burn's own
/// layers compute with the whole weight, on every rank the same. The optimizer steps this rank's shard, which restricts
/// it as [`fully_shard`](crate::fsdp::fully_shard) says.
///
/// Records hold this rank's shards and load where the same part is held: a record of the whole model is loaded before,
/// and saved from [`full_model`](crate::fsdp::full_model). Parameters are replaced before, too, as
/// [`fully_shard`](crate::fsdp::fully_shard) says.
///
/// Values are those of the mesh's first rank, and only that rank initializes parameters that are
/// still lazy. Buffers, such as running statistics, are that rank's too, and no clone shares them from then
/// on. Shards may be uneven.
///
/// With [`fully_shard`](crate::fsdp::fully_shard), in either order, each rank's shard is cut once more over
/// data-parallel ranks. Of a model that is sharded before, units keep their modules, their ranks and the dimensions
/// they cut: a placement function has then seen the whole parameters' shapes, and not those of this rank's shards.
/// Its parameters are gathered for that one after another. A model of which not even the tensor-parallel shards fit is
/// sharded first. What is placed over ranks that have data of their own, such as
/// [experts](crate::fsdp#meshes-of-several-dimensions), is parallelized first.
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
/// Every rank of the mesh must call it with an equal model and plan. If the mesh is a slice, so must
/// every rank of the mesh that it was sliced from, with the model of its own slice: slices initialize
/// their parameters in turn, the first of them first, so that runs that begin alike draw alike. Of a model that is
/// sharded already, so must every rank of its meshes.
///
/// # Errors
/// [`ParallelError`](super::ParallelError) and [`ParamError`](crate::param::ParamError) for a wrong mesh or plan,
/// before any value moves;
/// [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn parallelize<M: Module>(model: M, mesh: &DeviceMesh, plan: Plan) -> Result<M> {
    let inventory = ModelScan::of(&model);
    let lazy = inventory.params.iter().any(|found| found.lazy);
    let planned = resolve(&plan, inventory, mesh)?;
    let (mut sharded, mut is_sharded) = (Vec::new(), HashSet::new());
    let params = planned.into_iter().map(|param| {
        let ParallelizedParam { path, shape, dtype, sharded: before, styles, placements, modules, unit, depth } = param;
        let layout = Layout::new(mesh.shape(), &placements)?;
        let spec = DTensorSpec::new(mesh, layout, shape.into(), dtype)?.shared();
        let styles = Arc::new(LayerStyles::new(styles));
        let parallel = TpPlacement { spec: spec.clone(), styles, modules, data_dims: MeshDims::new() };
        if let Some((before, module)) = before {
            is_sharded.insert(path.clone());
            sharded.push(TpAfterFsdp { path: path.clone(), module, before, parallel: parallel.clone() });
        }
        let shape = spec.local_shape().to_vec();
        Ok((
            (unit, ()),
            UnitParam {
                path: path.into(),
                depth,
                shape,
                sharding: None,
                spec,
                parallel: Some(parallel),
                compute: None,
            },
        ))
    });
    let params = make_units(params.collect::<Result<_>>()?, |_, ()| None)?;
    // What is sharded is drawn already, and of units of its own.
    let params: Vec<_> = params.into_iter().filter(|param| !is_sharded.contains(&*param.info().path)).collect();
    let again = apply_tp_after_fsdp(sharded)?;
    let attached = params.iter().chain(again.iter().map(|attachment| &attachment.param));
    let units: Vec<_> = attached.map(|param| param.unit.clone()).collect();
    let attachments = params.into_iter().map(|param| {
        let UnitParam { path, spec, .. } = param.info();
        ShardAssignment {
            path: path.clone(),
            gathered: None,
            data_specs: vec![spec.clone()],
            copies: None,
            param,
            again: false,
        }
    });
    let all = mesh.communicator_over(&(0..mesh.ndim()).collect::<Vec<_>>())?;
    if !again.is_empty() {
        sync_buffers(&model)?;
    }
    let lazy = is_any_lazy(mesh, "parallelize", lazy)?;
    let place = || attach_shards(model, attachments, lazy, "parallelize");
    let model = if lazy { in_turn(mesh, "parallelize, in turn", place)? } else { place()? };
    // Data-parallel ranks are in different slices: what they do together comes after the turns.
    let model = if again.is_empty() { model } else { attach_shards(model, again, true, "parallelize, sharded")? };
    own_buffers(model, &units, &all, "parallelize")
}
