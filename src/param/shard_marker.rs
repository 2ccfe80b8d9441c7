//! [`ShardMarker`]: which part of its parameter a stored shard is, for records.
//!
//! Shards of equal cuts have equal shapes, so a record of one rank's would fit every other's model. Beside
//! a shard that is less than its parameter, visitors and mappers are therefore shown a tensor without
//! elements, whose path says what the shard is:
//!
//! ```text
//!   blocks.0.weight                                               [2, 4]
//!   blocks.0.weight.distributed.part [2:4, 0:4] of [4, 4]         [0]
//! ```
//!
//! burn loads a record by paths. In that of another part this one is missing, and burn's error names it.

use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Int, Tensor};
use itertools::Itertools;

use crate::dtensor::DTensorSpec;

/// What a record holds beside a shard.
#[derive(Debug)]
pub(super) struct ShardMarker {
    /// Last part of the path.
    name: String,
    /// Nothing, under that path.
    marker: Param<Tensor<1, Int>>,
}

impl ShardMarker {
    /// What visitors are told that it is a field of.
    pub(super) const OWNER: &'static str = "Part";

    /// The part of the tensor that the calling rank holds; `None` if it is the whole.
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
        let empty = |device: &_, _| Tensor::empty([0], device);
        Some(Self { name, marker: Param::uninitialized(ParamId::new(), empty, device, false, [0].into()) })
    }

    pub(super) fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module(&self.name, Self::OWNER);
        visitor.visit_int(&self.marker);
        visitor.exit_module(&self.name, Self::OWNER);
    }

    /// What `mapper` makes of it, such as what it loads, is dropped.
    pub(super) fn map<M: ModuleMapper>(&self, mapper: &mut M) {
        mapper.enter_module(&self.name, Self::OWNER);
        mapper.map_int(self.marker.clone());
        mapper.exit_module(&self.name, Self::OWNER);
    }
}
