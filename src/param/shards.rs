//! [`LocalShards`]: this rank's shards of some or all parameters of a unit.

use burn::backend::autodiff::NodeId;
use burn::backend::{AutodiffBackend, Dispatch, DispatchAutodiffContext, DispatchTensor};
use itertools::Itertools;

use super::recompute::leaves;
use super::states::ParamStateHandle;
use crate::autodiff;
use crate::memory;

/// Some parameters of a unit, as sorted indices into it, and this rank's shard of each as the model stores it: a
/// leaf of the graph, or a tensor without autodiff.
#[derive(Debug, Clone)]
pub(crate) struct LocalShards {
    pub(super) members: Vec<usize>,
    pub(super) bases: Vec<DispatchTensor>,
    /// State of each parameter.
    pub(super) states: Vec<ParamStateHandle>,
}

impl LocalShards {
    /// Collects parameters of one unit, given with their indices in the unit, and sorts them.
    pub(super) fn new(params: impl IntoIterator<Item = (usize, ParamStateHandle, DispatchTensor)>) -> Self {
        let (members, states, bases) = params.into_iter().sorted_by_key(|(index, ..)| *index).multiunzip();
        Self { members, bases, states }
    }

    /// Creates the shards of one parameter.
    pub(super) fn one(index: usize, state: ParamStateHandle, base: DispatchTensor) -> Self {
        Self { members: vec![index], bases: vec![base], states: vec![state] }
    }

    /// Returns the position of parameter `member` if these shards contain it with this same shard `base`.
    ///
    /// Clones of a module share its unit. A clone that was stepped, frozen or averaged has other shards.
    pub(super) fn position(&self, member: usize, base: &DispatchTensor) -> Option<usize> {
        let position = self.members.binary_search(&member).ok()?;
        same_value(&self.bases[position], base).then_some(position)
    }

    /// Returns the shards without autodiff.
    pub(crate) fn plain(&self) -> Vec<DispatchTensor> {
        self.bases.iter().cloned().map(plain).collect()
    }
}

/// Identity of [`LocalShards`]. It does not keep their graph alive.
#[derive(Debug)]
pub(super) struct LocalShardsId {
    members: Vec<usize>,
    values: Vec<ShardKey>,
}

/// Identity of one stored shard: its node in the graph, or its memory if it has none.
#[derive(Debug)]
enum ShardKey {
    Node(NodeId),
    Plain(Box<DispatchTensor>),
}

/// Two are equal if they are of the same shards of the same parameters.
impl PartialEq for LocalShardsId {
    fn eq(&self, other: &Self) -> bool {
        let is = |(a, b): (&ShardKey, &ShardKey)| match (a, b) {
            (ShardKey::Node(a), ShardKey::Node(b)) => a == b,
            (ShardKey::Plain(a), ShardKey::Plain(b)) => memory::is_same(a, b),
            _ => false,
        };
        self.members == other.members && self.values.iter().zip(&other.values).all(is)
    }
}

impl LocalShardsId {
    pub(super) fn of(shards: &LocalShards) -> Self {
        let key = |base: &DispatchTensor| match leaves::node_id(base) {
            Some(node) => ShardKey::Node(node),
            None => ShardKey::Plain(Box::new(base.clone())),
        };
        Self { members: shards.members.clone(), values: shards.bases.iter().map(key).collect() }
    }

    /// Returns true if these are the same shards of the same parameters.
    pub(super) fn is_of(&self, shards: &LocalShards) -> bool {
        let is = |(key, base): (&ShardKey, &DispatchTensor)| match (key, leaves::node_id(base)) {
            (ShardKey::Node(node), Some(other)) => *node == other,
            (ShardKey::Plain(plain), None) => memory::is_same(plain, base),
            _ => false,
        };
        self.members == shards.members && self.values.iter().zip(&shards.bases).all(is)
    }
}

/// Returns true if two stored shards are the same value, not merely equal ones.
fn same_value(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    match (autodiff::node_id(a.clone()), autodiff::node_id(b.clone())) {
        (None, None) => memory::is_same(a, b),
        (a, b) => a == b,
    }
}

/// Returns the tensor without autodiff.
pub(crate) fn plain(tensor: DispatchTensor) -> DispatchTensor {
    match tensor.autodiff {
        DispatchAutodiffContext::Disabled => tensor,
        DispatchAutodiffContext::Enabled(_) => Dispatch::inner(tensor),
    }
}
