//! [`homes`]: which distributed parameter a buffer goes with.

use burn::module::Module;

use crate::param::distributed::DistributedParameter;
use crate::param::inventory::{Buffer, Found, Inventory};

/// A buffer and the parameter that it goes with.
pub(super) struct Home {
    pub(super) path: String,
    /// Whether it is a `RunningState`.
    pub(super) running: bool,
    pub(super) param: DistributedParameter,
}

/// The buffers of a distributed model that go with a distributed parameter, in burn's order.
///
/// A buffer goes with the parameter that shares most of its path: the statistics of a batch norm with its
/// scale. Of several it is the first that is distributed. Where none of them is, the buffer is left alone,
/// as they are.
///
/// ```text
///   stem.norm.gamma             stem.norm.running_mean      with stem.norm.gamma
///   stem.conv.weight            head.counts                 with head.weight
///   head.weight                 steps                       with stem.norm.gamma
/// ```
pub(super) fn homes<M: Module>(model: &M) -> Vec<Home> {
    let Inventory { params, buffers, .. } = Inventory::of(model);
    let home = |Buffer { path, running }: Buffer| {
        let near = |found: &&Found| (common(modules(&path), modules(&found.path)), found.distributed.is_some());
        // Of several that are as near, `max_by_key` takes the last.
        let param = params.iter().rev().max_by_key(near)?.distributed.clone()?;
        Some(Home { path: path.join("."), running, param })
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
