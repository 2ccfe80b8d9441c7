//! [`ShardMarker`]: marks in a record which shard of its parameter a stored tensor is.
//!
//! Shards of equal shard sizes have equal shapes, so a record of one rank would fit the model of any other. Next to
//! each shard that is smaller than its parameter, visitors and mappers therefore see a tensor without elements. Its
//! path describes the shard:
//!
//! ```text
//!   blocks.0.weight                                               [2, 4]
//!   blocks.0.weight.distributed.part [2:4, 0:4] of [4, 4]         [0]
//! ```
//!
//! burn loads a record by paths. In the record of another shard this path is missing, and burn's error names it. Only
//! what is saved reads the tensor itself: the first time, a warning tells that shards are saved.

use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Int, Tensor};
use itertools::Itertools;

use super::warning::warn;
use crate::burn_compat::ModulePath;
use crate::dtensor::DTensorSpec;

/// True if this process has warned that shards are saved.
static WARNED: AtomicBool = AtomicBool::new(false);

/// Empty tensor that a record holds next to a shard, under a path that describes the shard.
#[derive(Debug)]
pub(super) struct ShardMarker {
    /// Last component of the path.
    name: String,
    /// Tensor without elements, stored under that path.
    marker: Param<Tensor<1, Int>>,
}

impl ShardMarker {
    /// Type name that visitors receive for the marker's module.
    const OWNER: &'static str = "Part";

    /// Creates the marker of the calling rank's shard. Returns `None` if the rank holds the full tensor.
    pub(super) fn of(spec: &DTensorSpec) -> Option<Self> {
        let shape = spec.shape();
        if spec.local_shape() == *shape {
            return None;
        }
        let range = |dim| {
            let range = spec.local_range(dim);
            format!("{}:{}", range.start, range.end)
        };
        let name = format!("part [{}] of {:?}", (0..shape.num_dims()).map(range).join(", "), shape.as_slice());
        let device = spec.mesh().device().clone();
        let is_first = spec.coordinate().iter().all(|&index| index == 0);
        let empty = move |device: &_, _| {
            if is_first && !WARNED.swap(true, Ordering::Relaxed) {
                warn(
                    "a record or file of a sharded model is written. It has only this rank's shards, and loads only on a \
                     rank with the same shards. To save the model itself, save `full_model(&model)?`, or \
                     `full_model_on(&model, 0)?` on one rank",
                );
            }
            Tensor::empty([0], device)
        };
        Some(Self { name, marker: Param::uninitialized(ParamId::new(), empty, device, false, [0].into()) })
    }

    /// Returns true if the field at this path is a marker.
    pub(super) fn is_at(path: &ModulePath) -> bool {
        path.last().is_some_and(|(_, container)| container.text() == Self::OWNER)
    }

    pub(super) fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module(&self.name, Self::OWNER);
        visitor.visit_int(&self.marker);
        visitor.exit_module(&self.name, Self::OWNER);
    }

    /// Shows `mapper` the marker. The tensor that it returns, for instance a loaded one, is dropped.
    pub(super) fn map<M: ModuleMapper>(&self, mapper: &mut M) {
        mapper.enter_module(&self.name, Self::OWNER);
        mapper.map_int(self.marker.clone());
        mapper.exit_module(&self.name, Self::OWNER);
    }
}
