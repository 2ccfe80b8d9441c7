//! [`Shards`]: this rank's shards of some or all parameters of a unit.

use burn::backend::{AutodiffBackend, Dispatch, DispatchAutodiffContext, DispatchTensor};
use itertools::Itertools;

use crate::autodiff;
use crate::memory;

/// Parameters of a unit, as sorted indices into it, and this rank's shard of each, as stored in the
/// model: a leaf of the graph, or plain.
#[derive(Debug, Clone)]
pub(crate) struct Shards {
    pub(super) members: Vec<usize>,
    pub(super) bases: Vec<DispatchTensor>,
}

impl Shards {
    /// Of parameters of one unit, each with its index there.
    pub(crate) fn new(params: impl IntoIterator<Item = (usize, DispatchTensor)>) -> Self {
        let (members, bases) = params.into_iter().sorted_by_key(|(index, _)| *index).unzip();
        Self { members, bases }
    }

    /// One parameter.
    pub(super) fn one(member: usize, base: DispatchTensor) -> Self {
        Self { members: vec![member], bases: vec![base] }
    }

    /// Where parameter `member` is, if it is here with this very shard.
    ///
    /// Clones of a module share its unit; one that was stepped, frozen or averaged does not share
    /// its shards.
    pub(super) fn position(&self, member: usize, base: &DispatchTensor) -> Option<usize> {
        let position = self.members.binary_search(&member).ok()?;
        same_value(&self.bases[position], base).then_some(position)
    }

    /// Whether both are the very same shards of the same parameters.
    pub(super) fn same(&self, other: &Self) -> bool {
        self.members == other.members && self.bases.iter().zip(&other.bases).all(|(a, b)| same_value(a, b))
    }

    /// The shards without autodiff.
    pub(super) fn plain(&self) -> Vec<DispatchTensor> {
        self.bases.iter().cloned().map(plain).collect()
    }
}

/// Whether two stored shards are one value: a node of the graph, or else the same memory.
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
