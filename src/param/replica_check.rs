//! Replica check: compares values that must be identical on several ranks, every few passes, to
//! detect silent data corruption.
//!
//! | values of a pass | identical on the ranks that | digests are computed |
//! |---|---|---|
//! | gathered weights | shard | when forward leaves the unit |
//! | averaged gradients | replicate | when they are reduced |
//! | gradients of parameters placed `Replicate`, averaged over the ranks that shard | shard | when they are averaged |
//! | on request, stored shards, and parameters placed `Replicate` | replicate | when its gradients are reduced |
//! | on request, parameters placed `Replicate` | shard | when its gradients are reduced |
//!
//! This crate computes the first three kinds: in one order, or by copies. Stored values are the
//! optimizer's work. They may differ in their last bits on processors of different kinds, so they
//! are compared on request only.
//!
//! This file has what is counted and kept; [`replica_digests`](super::replica_digests) computes the
//! digests.
//!
//! Digests are sent with the first reduction over these ranks: those of weights with the pass's own
//! reduction, those of gradients with the next reduction of any unit. So most of them are compared
//! in the same backward. A pass of a single parameter, read outside its unit, has its own counter.

use std::sync::OnceLock;

use parking_lot::Mutex;

use crate::comm::Digests;

/// Interval and extent of the replica check, and the digests that wait for the next reduction.
#[derive(Debug, Default)]
pub(crate) struct ReplicaCheck {
    /// Every n-th pass of a unit is checked, where n is this number; 0 disables the check.
    pub(crate) every: u64,
    /// True if stored weights are compared too.
    pub(crate) stored: bool,
    pub(crate) gradients: Mutex<PendingDigests>,
}

/// Ranks on which values are compared: those that shard, or the replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ComparedRanks {
    Shard,
    Replicate,
}

/// Digests that the reductions of a pass compare.
#[derive(Debug, Default)]
pub(crate) struct PendingDigests {
    /// Number of the pass if its reduced gradients are compared next; `None` otherwise.
    pub(super) checked_step: Option<u64>,
    /// Digests to compare over the ranks that shard.
    pub(super) shard: Vec<Digests>,
    /// Digests to compare over the replicas.
    pub(super) replicate: Vec<Digests>,
}

/// A pass whose replicated values are compared.
#[derive(Debug)]
pub(crate) struct CheckedPass {
    /// Number of the pass, counted from 1.
    pub(super) step: u64,
    /// Digests of the gathered weights of sharded parameters.
    pub(super) gathered: OnceLock<Vec<Option<u64>>>,
}

impl CheckedPass {
    pub(super) fn new(step: u64) -> Self {
        Self {
            step,
            gathered: OnceLock::new(),
        }
    }
}
