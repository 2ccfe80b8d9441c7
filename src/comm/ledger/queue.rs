//! [`InFlightCount`]: the collectives of a rank that are under way.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many collectives a rank has posted and neither taken the result of nor dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueDepth {
    /// At the moment.
    pub now: u64,
    /// The most there have been at once.
    pub most: u64,
}

/// Counts the collectives under way.
#[derive(Debug, Default)]
pub(super) struct InFlightCount {
    now: AtomicU64,
    most: AtomicU64,
}

impl InFlightCount {
    /// One is posted.
    pub fn enter(&self) {
        let before = self.now.fetch_add(1, Ordering::Relaxed);
        self.most.fetch_max(before + 1, Ordering::Relaxed);
    }

    /// One has its result, or nobody will take it.
    pub fn leave(&self) {
        self.now.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn depth(&self) -> QueueDepth {
        QueueDepth { now: self.now.load(Ordering::Relaxed), most: self.most.load(Ordering::Relaxed) }
    }

    /// Forgets all but those that are under way.
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
