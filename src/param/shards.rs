//! [`LocalShards`]: this rank's shards of some or all parameters of a unit.

use burn::backend::autodiff::NodeId;
use burn::backend::{AutodiffBackend, Dispatch, DispatchAutodiffContext, DispatchTensor};
use itertools::Itertools;

use super::recompute::leaves;
use super::states::ParamStateHandle;
use crate::autodiff;
use crate::memory;

/// Parameters of a unit, as sorted indices into it, and this rank's shard of each, as stored in the
/// model: a leaf of the graph, or plain.
#[derive(Debug, Clone)]
pub(crate) struct LocalShards {
    pub(super) members: Vec<usize>,
    pub(super) bases: Vec<DispatchTensor>,
    /// Which states they are of.
    pub(super) states: Vec<ParamStateHandle>,
}

impl LocalShards {
    /// Of parameters of one unit, each with its index there.
    pub(super) fn new(params: impl IntoIterator<Item = (usize, ParamStateHandle, DispatchTensor)>) -> Self {
        let (members, states, bases) = params.into_iter().sorted_by_key(|(index, ..)| *index).multiunzip();
        Self { members, bases, states }
    }

    /// One parameter.
    pub(super) fn one(index: usize, state: ParamStateHandle, base: DispatchTensor) -> Self {
        Self { members: vec![index], bases: vec![base], states: vec![state] }
    }

    /// Where parameter `member` is, if it is here with this very shard.
    ///
    /// Clones of a module share its unit; one that was stepped, frozen or averaged does not share
    /// its shards.
    pub(super) fn position(&self, member: usize, base: &DispatchTensor) -> Option<usize> {
        let position = self.members.binary_search(&member).ok()?;
        same_value(&self.bases[position], base).then_some(position)
    }

    /// The shards without autodiff.
    pub(super) fn plain(&self) -> Vec<DispatchTensor> {
        self.bases.iter().cloned().map(plain).collect()
    }
}

/// Which [`LocalShards`] those are, without the graph that they are leaves of.
#[derive(Debug)]
pub(super) struct LocalShardsId {
    members: Vec<usize>,
    values: Vec<ShardKey>,
}

/// A stored shard is one value: a node of the graph, or else its memory.
#[derive(Debug)]
enum ShardKey {
    Node(NodeId),
    Plain(Box<DispatchTensor>),
}

impl LocalShardsId {
    pub(super) fn of(shards: &LocalShards) -> Self {
        let key = |base: &DispatchTensor| match leaves::node_id(base) {
            Some(node) => ShardKey::Node(node),
            None => ShardKey::Plain(Box::new(base.clone())),
        };
        Self { members: shards.members.clone(), values: shards.bases.iter().map(key).collect() }
    }

    /// Whether these are the very same shards of the same parameters.
    pub(super) fn is_of(&self, shards: &LocalShards) -> bool {
        let is = |(key, base): (&ShardKey, &DispatchTensor)| match (key, leaves::node_id(base)) {
            (ShardKey::Node(node), Some(other)) => *node == other,
            (ShardKey::Plain(plain), None) => memory::is_same(plain, base),
            _ => false,
        };
        self.members == shards.members && self.values.iter().zip(&shards.bases).all(is)
    }
}

/// Whether two stored shards are one value.
fn same_value(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    match (autodiff::node_id(a.clone()), autodiff::node_id(b.clone())) {
        (None, None) => memory::is_same(a, b),
        (a, b) => a == b,
    }
}

/// The tensor without autodiff.
pub(super) fn plain(tensor: DispatchTensor) -> DispatchTensor {
    match tensor.autodiff {
        DispatchAutodiffContext::Disabled => tensor,
        DispatchAutodiffContext::Enabled(_) => Dispatch::inner(tensor),
    }
}
