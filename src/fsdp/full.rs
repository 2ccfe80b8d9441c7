//! [`full_model`]: a plain burn module out of a sharded one.

use burn::module::Module;
use itertools::Itertools;

use super::scope::{open_all, plain};
use super::visit::sharded_parameters;
use crate::{Result, autodiff};

/// Gathers every parameter and returns the ordinary module, with no trace of sharding.
///
/// One all-gather a unit; the result holds the whole model on every rank. Ids, mappers, devices
/// and training state are kept, so it saves, loads and trains as if it had never been sharded.
///
/// # Collective
/// Every rank of the model's meshes must call it.
///
/// # Errors
/// [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn full_model<M: Module>(model: &M) -> Result<M> {
    let visited = sharded_parameters(model);
    let units = visited.iter().map(|param| param.sharded.unit.clone()).unique_by(std::sync::Arc::as_ptr);
    let units = units.collect_vec();
    let mut scopes = Vec::with_capacity(units.len());
    let mut rest = visited;
    for unit in units {
        let (mut params, others): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|param| std::sync::Arc::ptr_eq(&param.sharded.unit, &unit));
        rest = others;
        params.sort_by_key(|param| param.sharded.index);
        let nodes = params.iter().map(|param| autodiff::node_id(param.base.clone())).collect();
        let shards = params.iter().map(|param| plain(param.base.clone())).collect_vec();
        unit.unshard(&shards, nodes);
        unit.wait_unsharded()?;
        scopes.push((unit, params));
    }
    Ok(open_all(scopes, || model.clone().materialize()))
}
