//! [`homes`]: which distributed parameter a buffer goes with.

use burn::module::Module;

use crate::param::distributed::DistributedParameter;
use crate::param::inventory::{Buffer, Inventory};

/// A buffer and the parameter that it goes with.
pub(super) struct Home {
    pub(super) path: String,
    /// Whether it is a `RunningState`.
    pub(super) running: bool,
    pub(super) param: DistributedParameter,
}

/// The buffers of a distributed model, in burn's order; of an ordinary one none.
///
/// A buffer goes with the first of the distributed parameters that share most of its path: the statistics
/// of a batch norm with its scale.
///
/// ```text
///   stem.norm.gamma             stem.norm.running_mean      with stem.norm.gamma
///   stem.conv.weight            head.counts                 with head.weight
///   head.weight                 steps                       with stem.norm.gamma
/// ```
pub(super) fn homes<M: Module>(model: &M) -> Vec<Home> {
    let Inventory { params, buffers, .. } = Inventory::of(model);
    let params: Vec<_> =
        params.into_iter().filter_map(|found| Some((modules(&found.path).to_vec(), found.distributed?))).collect();
    let home = |Buffer { path, running }: Buffer| {
        let near = |(other, _): &&(Vec<String>, _)| common(modules(&path), other);
        // Of several that are as near, `max_by_key` takes the last.
        let (_, param) = params.iter().rev().max_by_key(near)?;
        Some(Home { path: path.join("."), running, param: param.clone() })
    };
    buffers.into_iter().filter_map(home).collect()
}

/// The path of what holds it.
fn modules(path: &[String]) -> &[String] {
    path.split_last().map_or(&[], |(_, modules)| modules)
}

/// How many parts two paths begin with together.
fn common(a: &[String], b: &[String]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
