//! [`LedgerEntry`]: a collective that was counted.

use std::cell::Cell;
use std::sync::Arc;

use crate::comm::{Op, Phase};

thread_local! {
    static LISTENER: Cell<Option<fn(&LedgerEntry)>> = const { Cell::new(None) };
}

/// Has `listener` told of every collective that the calling thread has counted from now on.
pub(crate) fn listen(listener: Option<fn(&LedgerEntry)>) {
    LISTENER.set(listener);
}

/// One collective that was counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerEntry {
    /// Its place among all collectives that were counted, from 0.
    pub index: u64,
    /// What it did.
    pub op: Op,
    /// Number of ranks in its group.
    pub group_size: usize,
    /// Payload bytes.
    pub bytes: u64,
    /// The caller's label, such as a unit's path.
    pub label: Arc<str>,
    /// The pass it ran in.
    pub phase: Phase,
}

/// What is counted of one collective.
#[derive(Debug, Clone)]
pub(in crate::comm) struct Charge {
    /// Its place among those that the flight recorder has noted.
    pub noted: u64,
    pub op: Op,
    pub group_size: usize,
    pub bytes: u64,
    pub label: Arc<str>,
    pub phase: Phase,
}

/// Tells the listener.
pub(super) fn tell(index: u64, charge: &Charge) {
    if let Some(listener) = LISTENER.get() {
        let Charge { op, group_size, bytes, label, phase, .. } = charge.clone();
        listener(&LedgerEntry { index, op, group_size, bytes, label, phase });
    }
}
