//! [`Call`]: description of one collective for its signature and for the ledger.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Digests, Phase, TensorMeta};

/// Description of a collective. All fields except `phase` and `deferred` are part of the call's
/// signature, on which all ranks must agree. If ranks exchange tensors by NCCL, they must also agree
/// on `deferred`. `label` and `phase` are part of the ledger's key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Call {
    /// Name of the operation, such as the path of a unit. It must be the same on all ranks.
    pub label: Arc<str>,
    /// Pass in which the collective runs.
    pub phase: Phase,
    /// Forward index of a collective that the autodiff graph runs in backward, drawn in forward
    /// with [`Communicator::next_forward_index`](super::Communicator::next_forward_index). Ranks
    /// may run the backward operations of their graphs in different orders. If two operations with
    /// different indices meet, the ranks fail with an error instead of computing a wrong sum.
    pub forward_index: Option<u64>,
    /// Model whose parameters a unit's collective sends.
    pub model: Option<ShardedModel>,
    /// Shape and dtype of the distributed tensor, over all its ranks, that the collective
    /// redistributes.
    pub global_tensor: Option<TensorMeta>,
    /// Global shapes of the operands from which a partial sum was computed, if the collective
    /// reduces one, such as `[4, 8] and [8, 2]`.
    pub operand_shapes: Option<Arc<str>>,
    /// Names of the tensors, such as parameter paths, in the order in which the tensors are sent.
    /// Tensors after the last name have none. The names must be the same on all ranks.
    pub names: Option<Arc<[Arc<str>]>>,
    /// Digests of values that must be identical on all ranks of the group. The ranks compare them
    /// in this collective, which need not send the values themselves. Messages do not compare them.
    pub digests: Option<Arc<[Digests]>>,
    /// Description of what made this rank issue the call, such as the state of a unit. Ranks that
    /// describe it differently have decided by different inputs, and the next calls would not
    /// match. Compared if both ranks have one; a unit adds it in debug builds.
    pub decision: Option<Arc<str>>,
    /// True for a deferred call: posted before its result is needed, and counted by the ledger only
    /// when the rank waits for the result.
    pub deferred: bool,
}

impl Call {
    /// Creates a call with the name `label`, outside any training pass.
    pub fn new(label: impl Into<Arc<str>>) -> Self {
        Self {
            label: label.into(),
            ..Self::default()
        }
    }

    /// Sets the pass under which the ledger counts the call.
    pub fn with_phase(mut self, phase: Phase) -> Self {
        self.phase = phase;
        self
    }

    /// Sets the forward index of the call.
    pub fn with_forward_index(mut self, place: u64) -> Self {
        self.forward_index = Some(place);
        self
    }

    /// Sets the names of the tensors.
    pub fn with_names(mut self, names: impl IntoIterator<Item = Arc<str>>) -> Self {
        self.names = Some(names.into_iter().collect());
        self
    }

    /// Sets the digests to compare. An empty list means none.
    pub fn with_digests(mut self, digests: Vec<Digests>) -> Self {
        self.digests = (!digests.is_empty()).then(|| digests.into());
        self
    }

    /// Marks the call as deferred: the ledger counts it when the rank waits for its result.
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

/// The model to which a unit's parameters belong. It is part of the signature because two ranks
/// that run two models of equal shapes in different orders may differ in nothing else.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ShardedModel {
    /// Sequence number of the model among those that were sharded over the same ranks.
    pub number: u64,
    /// Identifiers of the states of the parameters that are sent; a single one if it holds for all
    /// of them. Clones of a model share them until the parameters of one clone are mapped, as an
    /// optimizer does.
    pub states: Arc<[u64]>,
    /// Type of the model and the line where it was sharded. Ranks need not agree on it.
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

/// Displays as `2 (Linear, sharded at src/main.rs:17)`.
impl fmt::Display for ShardedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.number, self.origin)
    }
}
