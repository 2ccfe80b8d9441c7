//! [`Call`]: what a collective is for.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::{Digests, TensorMeta};

/// The pass a collective belongs to, as counted by the [`Ledger`](super::Ledger).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Phase {
    /// Set-up, checkpoints, norms: anything outside a training pass.
    #[default]
    Other,
    /// During a forward pass.
    Forward,
    /// During a backward pass.
    Backward,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Other => "other",
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

/// What a collective is for: part of its fingerprint, and of the ledger's key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Call {
    /// The caller's name for the operation, such as a unit's path. Must agree on all ranks.
    pub label: Arc<str>,
    /// The pass it runs in.
    pub phase: Phase,
    /// Index of a collective that the graph runs in backward: the one that
    /// [`Communicator::next_forward_index`](super::Communicator::next_forward_index) gave it in forward. The graph's
    /// order may differ between ranks; a collective that meets one drawn elsewhere in forward is then an error, where
    /// it could be a wrong sum. The ledger leaves it out.
    pub forward_index: Option<u64>,
    /// Of a unit's collective: whose parameters travel. The ledger leaves it out.
    pub model: Option<ShardedModel>,
    /// The distributed tensor, on all its ranks, of which a part travels. The ledger leaves it out.
    pub global_tensor: Option<TensorMeta>,
    /// Of a pending reduction: the global shapes of what its terms were computed from, such as
    /// `[4, 8] and [8, 2]`. The ledger leaves it out.
    pub operand_shapes: Option<Arc<str>>,
    /// Names of the tensors, such as the parameters' paths, in the order in which they travel; tensors
    /// after the last name have none. Must agree on all ranks. The ledger leaves them out.
    pub names: Option<Arc<[Arc<str>]>>,
    /// Digests of what all ranks of the group hold alike, which need not be what travels: compared on the way, but for
    /// messages. The ledger leaves them out.
    pub digests: Option<Arc<[Digests]>>,
    /// Issued ahead of need: the ledger counts it when its result is taken, and not before.
    pub deferred: bool,
}

impl Call {
    /// A call named `label` outside any training pass.
    pub fn new(label: impl Into<Arc<str>>) -> Self {
        Self { label: label.into(), ..Self::default() }
    }

    /// The same call counted under `phase`.
    pub fn with_phase(mut self, phase: Phase) -> Self {
        self.phase = phase;
        self
    }

    /// The same call with its place in forward.
    pub fn with_forward_index(mut self, place: u64) -> Self {
        self.forward_index = Some(place);
        self
    }

    /// The same call, of tensors of these names.
    pub fn with_names(mut self, names: impl IntoIterator<Item = Arc<str>>) -> Self {
        self.names = Some(names.into_iter().collect());
        self
    }

    /// The same call, which compares these, if there are any.
    pub fn with_digests(mut self, digests: Vec<Digests>) -> Self {
        self.digests = (!digests.is_empty()).then(|| digests.into());
        self
    }

    /// The same call, counted when its result is taken.
    pub fn with_deferred(mut self) -> Self {
        self.deferred = true;
        self
    }
}

impl From<&str> for Call {
    fn from(label: &str) -> Self {
        Self::new(label)
    }
}

/// The model that a unit's parameters are of. Ranks that run two models of equal shapes in different orders differ in it,
/// and may differ in nothing else.
#[derive(Debug, Clone, Default)]
pub struct ShardedModel {
    /// The number of the call that has sharded it, of those over the same ranks.
    pub number: u64,
    /// Names of the states of its parameters that travel, one if it is that of all. Clones of a model have the same, until
    /// the parameters of either are mapped, as an optimizer does.
    pub states: Arc<[u64]>,
    /// What it is and where it was sharded. Ranks need not agree on it.
    pub origin: Arc<str>,
}

impl PartialEq for ShardedModel {
    fn eq(&self, other: &Self) -> bool {
        (self.number, &self.states) == (other.number, &other.states)
    }
}

impl Eq for ShardedModel {}

impl Hash for ShardedModel {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (self.number, &self.states).hash(hasher);
    }
}

/// `2 (Linear, sharded at src/main.rs:17)`
impl fmt::Display for ShardedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.number, self.origin)
    }
}
