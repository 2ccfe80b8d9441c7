//! [`LocalShards`]: this rank's shards of some or all parameters of a unit. [`ShardMarker`]: their marker in records.

use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;
use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Int, Tensor};
use itertools::Itertools;

use super::copied_leaves;
use super::states::ParamStateHandle;
use super::warning::warn;
use crate::burn_compat::ModulePath;
use crate::dtensor::DTensorSpec;
use crate::{autodiff, memory};

/// Some parameters of a unit, as sorted indices into it, and this rank's shard of each as the model
/// stores it: a leaf of the graph, or a tensor without autodiff.
#[derive(Debug, Clone)]
pub(crate) struct LocalShards {
    pub(crate) members: Vec<usize>,
    pub(crate) bases: Vec<DispatchTensor>,
    /// State of each parameter.
    pub(crate) states: Vec<ParamStateHandle>,
}

impl LocalShards {
    /// Collects parameters of one unit, given with their indices in the unit, and sorts them.
    pub(crate) fn new(
        params: impl IntoIterator<Item = (usize, ParamStateHandle, DispatchTensor)>,
    ) -> Self {
        let (members, states, bases) = params
            .into_iter()
            .sorted_by_key(|(index, ..)| *index)
            .multiunzip();
        Self {
            members,
            bases,
            states,
        }
    }

    /// Returns the position of parameter `member` if these shards contain it with this same shard
    /// `base`.
    ///
    /// Clones of a module share its unit. A clone that was stepped, frozen or averaged has other
    /// shards.
    pub(crate) fn position(&self, member: usize, base: &DispatchTensor) -> Option<usize> {
        let position = self.members.binary_search(&member).ok()?;
        same_value(&self.bases[position], base).then_some(position)
    }

    /// Returns the shards without autodiff.
    pub(crate) fn plain(&self) -> Vec<DispatchTensor> {
        self.bases.iter().cloned().map(autodiff::plain).collect()
    }
}

/// Identity of [`LocalShards`] in one encoding: two are equal if they are of the same shards of the
/// same parameters, and all-gathers send them in the same encoding. It does not keep their graph
/// alive.
#[derive(Debug, PartialEq)]
pub(crate) struct LocalShardsId {
    members: Vec<usize>,
    values: Vec<ShardKey>,
    encoding: u64,
}

/// Identity of one stored shard: its node in the graph, or its memory if it has none.
#[derive(Debug)]
enum ShardKey {
    Node(NodeId),
    Plain(Box<DispatchTensor>),
}

impl PartialEq for ShardKey {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Node(a), Self::Node(b)) => a == b,
            (Self::Plain(a), Self::Plain(b)) => memory::is_same(a, b),
            _ => false,
        }
    }
}

impl LocalShardsId {
    /// Returns true if `other` has another shard of a parameter that is among these, or the same in
    /// another encoding.
    pub(crate) fn replaces(&self, other: &Self) -> bool {
        self.members
            .iter()
            .zip(&self.values)
            .any(|(member, value)| {
                other
                    .members
                    .binary_search(member)
                    .is_ok_and(|at| *value != other.values[at] || self.encoding != other.encoding)
            })
    }

    pub(crate) fn of(shards: &LocalShards, encoding: u64) -> Self {
        let key = |base: &DispatchTensor| match copied_leaves::node_id(base) {
            Some(node) => ShardKey::Node(node),
            None => ShardKey::Plain(Box::new(base.clone())),
        };
        Self {
            members: shards.members.clone(),
            values: shards.bases.iter().map(key).collect(),
            encoding,
        }
    }
}

/// Returns true if two stored shards are the same value, not merely equal ones.
fn same_value(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    match (autodiff::node_id(a.clone()), autodiff::node_id(b.clone())) {
        (None, None) => memory::is_same(a, b),
        (a, b) => a == b,
    }
}

/// True if this process has warned that shards are saved.
static WARNED: AtomicBool = AtomicBool::new(false);

/// Empty tensor that a record holds next to a shard, under a path that describes the shard.
///
/// Shards of equal shard sizes have equal shapes, so a record of one rank would fit the model of
/// any other. Next to each shard that is smaller than its parameter, visitors and mappers therefore
/// see a tensor without elements. Its path describes the shard:
///
/// ```text
///   blocks.0.weight                                               [2, 4]
///   blocks.0.weight.distributed.part [2:4, 0:4] of [4, 4]         [0]
/// ```
///
/// burn loads a record by paths. In the record of another shard this path is missing, and burn's
/// error names it. Only what is saved reads the tensor itself: the first time, a warning tells that
/// shards are saved.
#[derive(Debug)]
pub(crate) struct ShardMarker {
    /// Last component of the path.
    name: String,
    /// Tensor without elements, stored under that path.
    marker: Param<Tensor<1, Int>>,
}

impl ShardMarker {
    /// Type name that visitors receive for the marker's module.
    const OWNER: &'static str = "Part";

    /// Creates the marker of the calling rank's shard. Returns `None` if the rank holds the full
    /// tensor.
    pub(crate) fn of(spec: &DTensorSpec) -> Option<Self> {
        let shape = spec.shape();
        if spec.local_shape() == *shape {
            return None;
        }
        let range = |dim| {
            let range = spec.local_range(dim);
            format!("{}:{}", range.start, range.end)
        };
        let name = format!(
            "part [{}] of {:?}",
            (0..shape.num_dims()).map(range).join(", "),
            shape.as_slice()
        );
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
        Some(Self {
            name,
            marker: Param::uninitialized(ParamId::new(), empty, device, false, [0].into()),
        })
    }

    /// Returns true if the field at this path is a marker.
    pub(crate) fn is_at(path: &ModulePath) -> bool {
        path.last()
            .is_some_and(|(_, container)| container.text() == Self::OWNER)
    }

    pub(crate) fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module(&self.name, Self::OWNER);
        visitor.visit_int(&self.marker);
        visitor.exit_module(&self.name, Self::OWNER);
    }

    /// Shows `mapper` the marker. The tensor that it returns, for instance a loaded one, is
    /// dropped.
    pub(crate) fn map<M: ModuleMapper>(&self, mapper: &mut M) {
        mapper.enter_module(&self.name, Self::OWNER);
        mapper.map_int(self.marker.clone());
        mapper.exit_module(&self.name, Self::OWNER);
    }
}
