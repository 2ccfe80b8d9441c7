//! [`homes`]: assigns each buffer to a distributed parameter.

use std::collections::HashMap;

use burn::module::Module;

use crate::param::distributed::DistributedParameter;
use crate::param::model_scan::{Buffer, ModelScan, ScannedParam};

/// A buffer and the parameter whose groups it uses.
pub(super) struct BufferOwner {
    pub(super) path: String,
    /// True if the buffer is a `RunningState`.
    pub(super) running: bool,
    pub(super) param: DistributedParameter,
}

/// Returns the buffers of a distributed model that belong to a distributed parameter, in burn's order.
///
/// A buffer belongs to the parameter with the longest common path prefix: the statistics of a batch norm belong to
/// its scale. If several parameters share that prefix, it is the first that is distributed. If none of them is
/// distributed, the buffer is not returned, and stays local like those parameters.
///
/// ```text
///   stem.norm.gamma             stem.norm.running_mean      belongs to stem.norm.gamma
///   stem.conv.weight            head.counts                 belongs to head.weight
///   head.weight                 steps                       belongs to stem.norm.gamma
/// ```
pub(super) fn homes<M: Module>(model: &M) -> Vec<BufferOwner> {
    let ModelScan { params, buffers, .. } = ModelScan::of(model);
    // For each module path that contains parameters at any depth: the first of them that is distributed, if any.
    let mut first: HashMap<&[String], Option<&DistributedParameter>> = HashMap::new();
    for ScannedParam { path, distributed, .. } in &params {
        for depth in 0..path.len() {
            let first = first.entry(&path[..depth]).or_default();
            *first = first.or(distributed.as_ref());
        }
    }
    let home = |Buffer { path, running }: Buffer| {
        let param = (0..path.len()).rev().find_map(|depth| first.get(&path[..depth])).copied().flatten()?.clone();
        Some(BufferOwner { path: path.join("."), running, param })
    };
    buffers.into_iter().filter_map(home).collect()
}
