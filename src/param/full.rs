//! [`full_model`]: a plain burn module out of a distributed one.

use std::sync::Arc;

use burn::module::Module;
use itertools::Itertools;

use super::read::open_all;
use super::replaced::check_whole;
use super::running::{sync_buffers, unshared};
use super::shards::Shards;
use super::unit::Unit;
use super::visit::{Visited, walk};
use crate::Result;

/// Gathers every parameter and returns the ordinary module, with no trace of sharding.
///
/// One all-gather per unit; of a unit that is only partly in `model`, just those parameters. Then one
/// for each parameter that is sharded over tensor-parallel ranks. Before them comes
/// [`sync_buffers`], which makes running statistics equal on all ranks, also those of `model`. The result
/// holds the whole model on every rank, and shares nothing that a forward writes. Adapters of ignored weights (LoRA) are
/// merged into them. Ids, mappers, devices and training state are kept, so it saves, loads and trains
/// as if it had never been sharded.
///
/// # Collective
/// Every rank of the model's meshes must call it.
///
/// # Errors
/// [`ParamError::Replaced`](super::ParamError::Replaced) if a parameter was replaced after it was distributed;
/// [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn full_model<M: Module>(model: &M) -> Result<M> {
    let by_unit = |visited: &Visited| Arc::as_ptr(&visited.param.unit);
    sync_buffers(model)?;
    let mut units: Vec<(Arc<Unit>, Shards)> = Vec::new();
    // Units in the order of the model: addresses differ from rank to rank.
    let walk = walk(model);
    check_whole(model, &walk)?;
    let visited = walk.distributed;
    let order = visited.iter().map(by_unit).unique().collect_vec();
    let mut groups = visited.into_iter().into_group_map_by(by_unit);
    for key in order {
        let params = groups.remove(&key).expect("every unit has a group");
        let unit = params[0].param.unit.clone();
        units.push((unit, Shards::new(params.into_iter().map(Visited::shard))));
    }
    unshared(open_all(units, || model.clone().materialize()))
}
