//! [`ThreadState`]: what this module keeps for a thread, that is for a rank.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use super::recompute::context::RecomputeContext;
#[cfg(feature = "testing")]
use super::trace::Trace;
use super::unit_pass::BackwardScheduler;
use super::unit_stack::UnitStack;
use crate::comm::explain_panics_by;

/// The forwards and backwards of a thread.
pub(super) struct ThreadState {
    pub(super) stack: RefCell<UnitStack>,
    /// The innermost checkpointed block that runs.
    pub(super) block: RefCell<Option<Rc<RecomputeContext>>>,
    /// Number of blocks that run as if they were not checkpointed, because nothing is tracked on
    /// this rank, while other ranks may checkpoint them.
    pub(super) untracked_blocks: Cell<usize>,
    /// The passes that the thread enters.
    pub(super) passes: Arc<BackwardScheduler>,
    #[cfg(feature = "testing")]
    pub(super) trace: RefCell<Option<Trace>>,
}

impl Drop for ThreadState {
    /// Gives up the passes that had no backward. They own the scheduler, which holds their leaves,
    /// so burn would keep their graphs.
    fn drop(&mut self) {
        self.passes.release_leaves();
    }
}

thread_local! {
    static THREAD: ThreadState = {
        explain_panics_by(|text| thread(|thread| thread.passes.explain(text)));
        ThreadState {
            stack: RefCell::default(),
            block: RefCell::default(),
            untracked_blocks: Cell::default(),
            passes: Arc::default(),
            #[cfg(feature = "testing")]
            trace: RefCell::default(),
        }
    };
}

/// Calls `f` with the state of this thread.
pub(super) fn thread<T>(f: impl FnOnce(&ThreadState) -> T) -> T {
    THREAD.with(f)
}
