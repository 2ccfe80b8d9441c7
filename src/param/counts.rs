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
    forwards: AtomicU64,
    backwards: AtomicU64,
    sweeps: AtomicU64,
}

impl ProgramCounts {
    /// Counts a forward that has left the unit, and that a backward may follow. Returns its number,
    /// from 1.
    pub(super) fn count_forward(&self) -> u64 {
        self.forwards.fetch_add(1, Relaxed) + 1
    }

    /// Counts the backward of such a forward.
    pub(super) fn count_backward(&self) {
        self.backwards.fetch_add(1, Relaxed);
    }

    /// Counts a [sweep](super::sweep::sweep).
    pub(super) fn count_sweep(&self) {
        self.sweeps.fetch_add(1, Relaxed);
    }

    /// Counts the forwards that wait for their backward as abandoned.
    pub(crate) fn abandon(&self) {
        self.backwards.store(self.forwards(), Relaxed);
    }

    /// Returns the number of forwards that have left the unit, and that a backward may have
    /// followed.
    pub(super) fn forwards(&self) -> u64 {
        self.forwards.load(Relaxed)
    }

    /// Returns the number of these forwards whose backward has not run. It may never run.
    pub(super) fn waiting(&self) -> u64 {
        self.forwards().saturating_sub(self.backwards.load(Relaxed))
    }

    /// Returns the number of sweeps.
    pub(super) fn sweeps(&self) -> u64 {
        self.sweeps.load(Relaxed)
    }
}
