//! [`LedgerEntry`]: one counted collective.

use std::sync::Arc;

use crate::comm::{Op, Phase};

/// One collective that the ledger has counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerEntry {
    /// Index among all counted collectives, from 0.
    pub index: u64,
    /// Operation of the collective.
    pub op: Op,
    /// Number of ranks in the group.
    pub group_size: usize,
    /// Payload bytes.
    pub bytes: u64,
    /// Label of the call, such as the path of a unit.
    pub label: Arc<str>,
    /// Pass in which it ran.
    pub phase: Phase,
}
