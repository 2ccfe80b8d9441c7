//! State of the replica check, which [`verify`](super::verify) performs: it compares values that must be identical
//! on several ranks.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;

use crate::comm::Digests;

/// Interval and extent of the replica check, and the digests that wait for the next reduction.
#[derive(Debug)]
pub(crate) struct ReplicaCheck {
    pub(super) every: u64,
    /// True if stored weights are compared too.
    pub(super) stored: bool,
    pub(super) gradients: Mutex<PendingDigests>,
}

/// Digests that the reductions of a pass compare.
#[derive(Debug, Default)]
pub(super) struct PendingDigests {
    /// Number of the pass if its reduced gradients are compared next; `None` otherwise.
    pub(super) due: Option<u64>,
    /// Digests to compare over the ranks that shard.
    pub(super) shard: Vec<Digests>,
    /// Digests to compare over the replicas.
    pub(super) replicate: Vec<Digests>,
}

impl ReplicaCheck {
    /// Checks every n-th pass of a unit, where n is `passes`; 0 disables the check. It includes the stored weights if
    /// `stored` is true.
    pub(crate) fn every(passes: u64, stored: bool) -> Self {
        Self { every: passes, stored, gradients: Mutex::default() }
    }

    pub(crate) fn passes(&self) -> u64 {
        self.every
    }

    pub(crate) fn includes_stored(&self) -> bool {
        self.stored
    }
}

/// Numbers of passes that trained a parameter: one count for the unit, then one for each parameter that was read
/// outside the unit.
#[derive(Debug)]
pub(super) struct Passed(pub(super) Box<[AtomicU64]>);

impl Passed {
    /// Creates the counters of a unit with this number of parameters.
    pub(super) fn new(params: usize) -> Self {
        Self((0..=params).map(|_| AtomicU64::new(0)).collect())
    }
}

/// A pass whose replicated values are compared.
#[derive(Debug)]
pub(super) struct CheckedPass {
    /// Number of the pass, counted from 1.
    pub(super) step: u64,
    /// Digests of the gathered weights of sharded parameters.
    pub(super) gathered: OnceLock<Vec<Option<u64>>>,
}
