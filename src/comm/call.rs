//! [`Call`]: what a collective is for.

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

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
    /// Of a collective that the graph runs in backward: the place that [`Communicator::draw`](super::Communicator::draw) gave it
    /// in forward. The graph's order may differ between ranks; a collective that meets one drawn
    /// elsewhere in forward is then an error, where it could be a wrong sum. The ledger leaves it out.
    pub drawn: Option<u64>,
    /// The distributed tensor, on all its ranks, of which a part travels. The ledger leaves it out.
    pub whole: Option<TensorMeta>,
    /// Of a pending reduction: the global shapes of what its terms were computed from, such as
    /// `[4, 8] and [8, 2]`. The ledger leaves it out.
    pub terms: Option<Arc<str>>,
    /// Names of the tensors, such as the parameters' paths, in the order in which they travel; tensors
    /// after the last name have none. Must agree on all ranks. The ledger leaves them out.
    pub names: Option<Arc<[Arc<str>]>>,
    /// Digests of what all ranks of the group hold alike, which need not be what travels: compared on the way, but for
    /// messages. The ledger leaves them out.
    pub digests: Option<Arc<[Digests]>>,
    /// Issued ahead of need: the ledger counts it when its result is taken, and not before.
    pub ahead: bool,
}

impl Call {
    /// A call named `label` outside any training pass.
    pub fn new(label: impl Into<Arc<str>>) -> Self {
        Self { label: label.into(), ..Self::default() }
    }

    /// The same call counted under `phase`.
    pub fn in_phase(mut self, phase: Phase) -> Self {
        self.phase = phase;
        self
    }

    /// The same call with its place in forward.
    pub fn drawn(mut self, place: u64) -> Self {
        self.drawn = Some(place);
        self
    }

    /// The same call, of tensors of these names.
    pub fn named(mut self, names: impl IntoIterator<Item = Arc<str>>) -> Self {
        self.names = Some(names.into_iter().collect());
        self
    }

    /// The same call, which compares these, if there are any.
    pub fn comparing(mut self, digests: Vec<Digests>) -> Self {
        self.digests = (!digests.is_empty()).then(|| digests.into());
        self
    }

    /// The same call, counted when its result is taken.
    pub fn ahead(mut self) -> Self {
        self.ahead = true;
        self
    }
}

impl From<&str> for Call {
    fn from(label: &str) -> Self {
        Self::new(label)
    }
}
