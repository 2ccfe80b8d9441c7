//! [`scheduler`]: the passes and reductions of the calling thread, that is of a rank.

use std::sync::Arc;

use super::unit_pass::BackwardScheduler;
use crate::comm::explain_panics_by;

/// The passes that a thread enters.
struct ThreadScheduler(Arc<BackwardScheduler>);

impl Drop for ThreadScheduler {
    /// Gives up the passes that had no backward. They own the scheduler, which holds their leaves,
    /// so burn would keep their graphs.
    fn drop(&mut self) {
        self.0.release_leaves();
    }
}

thread_local! {
    static SCHEDULER: ThreadScheduler = {
        explain_panics_by(|text| scheduler().explain(text));
        ThreadScheduler(Arc::default())
    };
}

/// Returns the scheduler of this thread.
pub(super) fn scheduler() -> Arc<BackwardScheduler> {
    SCHEDULER.with(|scheduler| scheduler.0.clone())
}
