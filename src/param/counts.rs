//! [`ProgramCounts`]: what the program has done with a unit. All ranks count the same.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Numbers of a unit's forwards and backwards.
///
/// They count what the program does, which is the same on all ranks: a forward counts when it
/// leaves the unit, and a backward when the gradients of the unit are complete. They do not count
/// the passes that exist. How long a pass exists after its forward is decided by burn's graph on
/// each rank, so no count that `Drop` changes is among them.
#[derive(Debug, Default)]
pub(crate) struct ProgramCounts {
    left: AtomicU64,
    ended: AtomicU64,
    swept: AtomicU64,
}

impl ProgramCounts {
    /// Counts a forward that has left the unit, and that a backward may follow. Returns its number,
    /// from 1.
    pub(super) fn leave(&self) -> u64 {
        self.left.fetch_add(1, Relaxed) + 1
    }

    /// Counts the backward of such a forward.
    pub(super) fn end(&self) {
        self.ended.fetch_add(1, Relaxed);
    }

    /// Counts a [sweep](super::sweep::sweep).
    pub(super) fn sweep(&self) {
        self.swept.fetch_add(1, Relaxed);
    }

    /// Counts the forwards that wait for their backward as abandoned.
    pub(crate) fn abandon(&self) {
        self.ended.store(self.left(), Relaxed);
    }

    /// Returns the number of forwards that have left the unit, and that a backward may have
    /// followed.
    pub(super) fn left(&self) -> u64 {
        self.left.load(Relaxed)
    }

    /// Returns the number of these forwards whose backward has not run. It may never run.
    pub(super) fn waiting(&self) -> u64 {
        self.left().saturating_sub(self.ended.load(Relaxed))
    }

    /// Returns the number of sweeps.
    pub(super) fn swept(&self) -> u64 {
        self.swept.load(Relaxed)
    }
}
