//! [`apply_after_fsdp`]: data-parallel sharding of parameters that are parallelized after they were sharded.
//!
//! Tensor parallelism shards a parameter first, whichever function is called first. So each sharded
//! parameter is gathered, parallelized, and sharded once more in the same way, one parameter after
//! another:
//!
//! ```text
//!   fully_shard   W[mine, :]          sharded over the shard ranks
//!   gathered      W
//!   parallelize   W[:, part]          sharded over the tensor-parallel ranks
//!   result        W[mine, part]       sharded over the same shard ranks, along the same dimension
//! ```

use std::sync::Arc;

use itertools::Itertools;

use crate::Result;
use crate::param::{
    DistributedParameter, ShardAssignment, TpPlacement, UnitName, UnitParam, combine, data_spec,
    make_units,
};
use crate::placement::ShardSizes;

/// A sharded parameter that is being parallelized.
pub(super) struct TpAfterFsdp {
    /// Path in the model.
    pub(super) path: String,
    /// Path of its unit's module.
    pub(super) module: String,
    /// The parameter as `fully_shard` sharded it.
    pub(super) before: DistributedParameter,
    /// Tensor-parallel placement that `parallelize` gives it.
    pub(super) parallel: TpPlacement,
}

/// Returns the assignments that gather these parameters, parallelize them and shard them once more.
/// The parameters must be in burn's order. Units, groups and dimensions stay as they were.
///
/// Local: no communication.
///
/// # Errors
/// [`ParamError::Meshes`](crate::param::ParamError::Meshes) unless the meshes are slices of one,
/// along different dimensions.
pub(super) fn apply_after_fsdp(params: Vec<TpAfterFsdp>) -> Result<Vec<ShardAssignment>> {
    let params = params.into_iter().map(
        |TpAfterFsdp {
             path,
             module,
             before,
             parallel,
         }| {
            let info = before.info();
            let mesh = &before.unit.spec().sharded_data().mesh;
            let shape = parallel.spec.local_shape().to_vec();
            // Chunks are recomputed for this rank's tensor-parallel shard.
            let sharding = info.sharding().map(|(dim, sizes)| match sizes {
                ShardSizes::Chunked(_) => (dim, ShardSizes::Chunked(shape[dim])),
                ShardSizes::Uneven(_) => (dim, sizes),
            });
            let over_data =
                data_spec(mesh, sharding.as_ref(), &shape, parallel.spec.dtype())?.shared();
            let data_specs = vec![parallel.spec.clone(), over_data];
            let spec = combine(mesh, sharding.as_ref(), &parallel.spec)?.shared();
            let param = UnitParam {
                path: path.into(),
                depth: info.depth,
                sharding_dim: mesh.sharding_dim(&spec),
                spec,
                parallel: Some(parallel),
                compute: info.compute,
            };
            Ok(((before, data_specs), (module, param)))
        },
    );
    let params: Vec<_> = params.collect::<Result<_>>()?;
    let units = params
        .into_iter()
        .enumerate()
        .into_group_map_by(|(_, ((before, _), _))| Arc::as_ptr(&before.unit));
    let mut attachments = Vec::new();
    for params in units.into_values() {
        // Grouped by the unit and not by its module, because several calls may have made several
        // units of one module.
        let unit = &params[0].1.0.0.unit;
        let (unit, data, was_group) =
            (unit.clone(), unit.spec().data.clone(), unit.comm.is_group());
        let (before, (modules, params)): (Vec<_>, (Vec<_>, Vec<_>)) = params
            .into_iter()
            .map(|(at, (before, param))| ((at, before), param))
            .unzip();
        let keys = UnitName::regrouped(was_group, &modules)
            .into_iter()
            .map(|path| (path, ()));
        let made = make_units(keys.zip(params).collect(), |_, ()| data.clone())?;
        made.iter()
            .for_each(|param| param.unit.comm.join(&unit.comm));
        for ((at, (before, data_specs)), param) in before.into_iter().zip(made) {
            let gathered = Some(before);
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
    Ok(attachments
        .into_iter()
        .map(|(_, attachment)| attachment)
        .collect())
}
