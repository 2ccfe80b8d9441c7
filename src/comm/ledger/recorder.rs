//! [`Recorder`]: the last collectives, one by one.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::comm::{Op, Phase};

/// How many entries are kept.
const RECENT: usize = 1024;

thread_local! {
    static LISTENER: Cell<Option<fn(&Entry)>> = const { Cell::new(None) };
}

/// Has `listener` told of every collective that the calling thread has counted from now on.
pub(crate) fn listen(listener: Option<fn(&Entry)>) {
    LISTENER.set(listener);
}

/// One collective, as the ledger's flight recorder keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its place among all collectives of this rank, from 0.
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
    pub op: Op,
    pub group_size: usize,
    pub bytes: u64,
    pub label: Arc<str>,
    pub phase: Phase,
}

/// A flight recorder.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    recent: VecDeque<Entry>,
    count: u64,
}

impl Recorder {
    /// Keeps one collective, and tells the listener of it.
    pub fn record(&mut self, charge: &Charge) {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        let Charge { op, group_size, bytes, label, phase } = charge.clone();
        let entry = Entry { index: self.count, op, group_size, bytes, label, phase };
        if let Some(listener) = LISTENER.get() {
            listener(&entry);
        }
        self.recent.push_back(entry);
        self.count += 1;
    }

    /// The last collectives, oldest first.
    pub fn recent(&self) -> Vec<Entry> {
        self.recent.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recorder_keeps_the_last_entries() {
        let mut recorder = Recorder::default();
        for i in 0..RECENT as u64 + 5 {
            let (op, label, phase) = (Op::Barrier, "".into(), Phase::Other);
            recorder.record(&Charge { op, group_size: 4, bytes: i, label, phase });
        }
        let recent = recorder.recent();
        assert_eq!(recent.len(), RECENT);
        assert_eq!((recent[0].index, recent[RECENT - 1].bytes), (5, RECENT as u64 + 4));
    }
}
