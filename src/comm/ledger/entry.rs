//! [`LedgerEntry`]: one counted collective.

use std::cell::Cell;
use std::sync::Arc;

use crate::comm::{Op, Phase};

thread_local! {
    static LISTENER: Cell<Option<fn(&LedgerEntry)>> = const { Cell::new(None) };
}

/// Sets the function that is called for every collective that the calling thread counts from now on; `None` removes
/// it.
pub(crate) fn listen(listener: Option<fn(&LedgerEntry)>) {
    LISTENER.set(listener);
}

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

/// Properties of one collective that the ledger counts.
#[derive(Debug, Clone)]
pub(in crate::comm) struct Charge {
    /// Index of the operation in the flight recorder.
    pub noted: u64,
    pub op: Op,
    pub group_size: usize,
    pub bytes: u64,
    pub label: Arc<str>,
    pub phase: Phase,
}

/// Calls the listener of this thread, if there is one.
pub(super) fn tell(index: u64, charge: &Charge) {
    if let Some(listener) = LISTENER.get() {
        let Charge { op, group_size, bytes, label, phase, .. } = charge.clone();
        listener(&LedgerEntry { index, op, group_size, bytes, label, phase });
    }
}
