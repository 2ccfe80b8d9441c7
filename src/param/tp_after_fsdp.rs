//! [`apply_tp_after_fsdp`]: data-parallel cuts of parameters that are parallelized after they were sharded.
//!
//! Tensor parallelism cuts first, whatever was called first. So a sharded parameter is gathered,
//! parallelized, and cut again as it was, one after another:
//!
//! ```text
//!   fully_shard   W[mine, :]          cut by the shard ranks
//!   gathered      W
//!   parallelize   W[:, part]          cut by the tensor-parallel ranks
//!   recut         W[mine, part]       cut by the same shard ranks, along the same dimension
//! ```

use std::sync::Arc;

use itertools::Itertools;

use super::attach::ShardAssignment;
use super::combine::{combine, data_spec};
use super::distributed::{DistributedParameter, make_units};
use super::unit::{TpPlacement, UnitParam};
use super::unit_name::UnitName;
use crate::Result;
use crate::placement::ShardSizes;

/// A sharded parameter that is being parallelized.
pub(crate) struct TpAfterFsdp {
    /// Path in the model.
    pub(crate) path: String,
    /// Path of its module that is in the unit.
    pub(crate) module: String,
    /// How `fully_shard` cut it.
    pub(crate) before: DistributedParameter,
    /// What `parallelize` makes of it.
    pub(crate) parallel: TpPlacement,
}

/// What gathers these parameters, given in burn's order, parallelizes them and cuts them again: units of the modules,
/// groups and dimensions that they had.
///
/// Local: no communication.
///
/// # Errors
/// [`ParamError::Meshes`](super::ParamError::Meshes) unless the meshes are slices of one, along different dimensions.
pub(crate) fn apply_tp_after_fsdp(params: Vec<TpAfterFsdp>) -> Result<Vec<ShardAssignment>> {
    let params = params.into_iter().map(|TpAfterFsdp { path, module, before, parallel }| {
        let info = before.info();
        let mesh = &before.unit.data_parallel().expect("`fully_shard` cut it").mesh;
        let shape = parallel.spec.local_shape().to_vec();
        // Chunks are those of the rank's shard.
        let sharding = info.sharding.as_ref().map(|(dim, sizes)| match sizes {
            ShardSizes::Chunked(_) => (*dim, ShardSizes::Chunked(shape[*dim])),
            ShardSizes::Uneven(_) => (*dim, sizes.clone()),
        });
        let over_data = data_spec(mesh, sharding.as_ref(), &shape, parallel.spec.dtype())?.shared();
        let data_specs = vec![parallel.spec.clone(), over_data];
        let spec = combine(mesh, sharding.as_ref(), &parallel.spec)?.shared();
        let param = UnitParam {
            path: path.into(),
            depth: info.depth,
            shape,
            sharding,
            spec,
            parallel: Some(parallel),
            compute: info.compute,
        };
        Ok(((before, data_specs), (module, param)))
    });
    let params: Vec<_> = params.collect::<Result<_>>()?;
    let units = params.into_iter().enumerate().into_group_map_by(|(_, ((before, _), _))| Arc::as_ptr(&before.unit));
    let mut attachments = Vec::new();
    for params in units.into_values() {
        // By the unit and not by its module: of one module there may be several, made by several calls.
        let unit = &params[0].1.0.0.unit;
        let (unit, data, was_group) = (unit.clone(), unit.data.clone(), unit.is_group());
        let (before, (modules, params)): (Vec<_>, (Vec<_>, Vec<_>)) =
            params.into_iter().map(|(at, (before, param))| ((at, before), param)).unzip();
        let keys = UnitName::again(was_group, &modules).into_iter().map(|path| (path, ()));
        let made = make_units(keys.zip(params).collect(), |_, ()| data.clone())?;
        made.iter().for_each(|param| param.unit.join(&unit));
        for ((at, (before, data_specs)), param) in before.into_iter().zip(made) {
            let path = param.info().path.clone();
            attachments.push((
                at,
                ShardAssignment { path, param, gathered: Some(before), data_specs, copies: None, again: true },
            ));
        }
    }
    attachments.sort_by_key(|(at, _)| *at);
    Ok(attachments.into_iter().map(|(_, attachment)| attachment).collect())
}
