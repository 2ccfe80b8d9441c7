//! [`InFlightCount`]: the number of a rank's collectives in flight.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of collectives of a rank that are in flight: posted, and neither waited for nor dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueDepth {
    /// Current number.
    pub now: u64,
    /// Largest number so far.
    pub most: u64,
}

/// Counter of the collectives in flight.
#[derive(Debug, Default)]
pub(super) struct InFlightCount {
    now: AtomicU64,
    most: AtomicU64,
}

impl InFlightCount {
    /// Counts a posted collective.
    pub fn enter(&self) {
        let before = self.now.fetch_add(1, Ordering::Relaxed);
        self.most.fetch_max(before + 1, Ordering::Relaxed);
    }

    /// Removes a collective that was waited for or dropped.
    pub fn leave(&self) {
        self.now.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn depth(&self) -> QueueDepth {
        QueueDepth { now: self.now.load(Ordering::Relaxed), most: self.most.load(Ordering::Relaxed) }
    }

    /// Sets the maximum to the current number.
    pub fn reset(&self) {
        self.most.store(self.now.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_outlives_those_under_way_until_it_is_reset() {
        let queue = InFlightCount::default();
        (0..3).for_each(|_| queue.enter());
        (0..2).for_each(|_| queue.leave());
        queue.enter();
        assert_eq!(queue.depth(), QueueDepth { now: 2, most: 3 });
        queue.reset();
        assert_eq!(queue.depth(), QueueDepth { now: 2, most: 2 });
    }
}
