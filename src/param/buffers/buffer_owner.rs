//! [`homes`]: which distributed parameter a buffer goes with.

use std::collections::HashMap;

use burn::module::Module;

use crate::param::distributed::DistributedParameter;
use crate::param::model_scan::{Buffer, ModelScan, ScannedParam};

/// A buffer and the parameter that it goes with.
pub(super) struct BufferOwner {
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
pub(super) fn homes<M: Module>(model: &M) -> Vec<BufferOwner> {
    let ModelScan { params, buffers, .. } = ModelScan::of(model);
    // By path of a module that holds parameters, at any depth: the first of them that is distributed, if one is.
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
