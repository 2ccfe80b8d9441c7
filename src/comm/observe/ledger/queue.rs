//! [`QueueDepth`]: the number of a rank's collectives in flight.

use serde::Serialize;

/// Number of collectives of a rank that are in flight: posted, and neither waited for nor dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct QueueDepth {
    /// Current number.
    pub now: u64,
    /// Largest number so far.
    pub most: u64,
}

impl QueueDepth {
    /// Counts an accepted collective.
    pub(super) fn enter(&mut self) {
        self.now += 1;
        self.most = self.most.max(self.now);
    }

    /// Removes a collective that was waited for or dropped.
    pub(super) fn leave(&mut self) {
        self.now -= 1;
    }
}
