//! [`Progress`]: how far a pass's backward is, for the checks of debug builds.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// State of a pass in backward. Debug builds use it to check the rules of
/// [`backward_nodes`](super::backward_nodes).
#[derive(Debug)]
pub(super) struct Progress {
    /// Depth of the shallowest node that has run.
    shallowest: AtomicUsize,
    /// True if the pass's `PostBackward` node has run.
    ended: AtomicBool,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            shallowest: AtomicUsize::new(usize::MAX),
            ended: AtomicBool::new(false),
        }
    }
}

impl Progress {
    /// Records that a node which depends on the pass's `PostBackward` node runs.
    pub(super) fn node(&self, depth: usize) {
        if cfg!(debug_assertions) {
            assert!(
                !self.ended.load(Relaxed),
                "rule 2: a node of depth {depth} runs after its unit's `PostBackward`"
            );
            self.shallowest.fetch_min(depth, Relaxed);
        }
    }

    /// Records that the pass's `PostBackward` node runs.
    pub(super) fn token(&self, depth: usize) {
        if cfg!(debug_assertions) {
            let shallowest = self.shallowest.load(Relaxed);
            assert!(
                depth < shallowest,
                "rule 2: `PostBackward` is at depth {depth}, but a node of its unit is at depth {shallowest}"
            );
            assert!(
                !self.ended.swap(true, Relaxed),
                "rule 3: a unit's `PostBackward` runs twice"
            );
        }
    }

    /// Records that the pass's [`RootPostBackward`](super::backward_nodes::RootPostBackward) runs.
    pub(super) fn flush(&self, depth: usize) {
        debug_assert_eq!(
            depth, 1,
            "rule 6: `PostBackward` nodes at this depth may not have run"
        );
        debug_assert!(
            self.ended.load(Relaxed),
            "rule 6: a unit's gradients are flushed before its `PostBackward` ran"
        );
    }
}
