//! [`Progress`]: how far backward has come through a pass.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// State of a pass in backward, which debug builds keep to check the rules of [`backward_nodes`](super::backward_nodes).
#[derive(Debug)]
pub(super) struct Progress {
    /// The depth of the shallowest node that has run.
    shallowest: AtomicUsize,
    /// Whether the token has run.
    ended: AtomicBool,
}

impl Default for Progress {
    fn default() -> Self {
        Self { shallowest: AtomicUsize::new(usize::MAX), ended: AtomicBool::new(false) }
    }
}

impl Progress {
    /// A node that hangs on the pass's token runs.
    pub(super) fn node(&self, depth: usize) {
        if cfg!(debug_assertions) {
            assert!(!self.ended.load(Relaxed), "rule 2: a node of depth {depth} runs after its unit's token");
            self.shallowest.fetch_min(depth, Relaxed);
        }
    }

    /// The pass's token runs.
    pub(super) fn token(&self, depth: usize) {
        if cfg!(debug_assertions) {
            let shallowest = self.shallowest.load(Relaxed);
            assert!(
                depth < shallowest,
                "rule 2: a token of depth {depth}, and a node of its unit of depth {shallowest}"
            );
            assert!(!self.ended.swap(true, Relaxed), "rule 3: a unit's token runs twice");
        }
    }

    /// The pass's [`RootPostBackward`](super::backward_nodes::RootPostBackward) runs.
    pub(super) fn flush(&self, depth: usize) {
        debug_assert_eq!(depth, 1, "rule 6: tokens that are as deep may not have run");
        debug_assert!(self.ended.load(Relaxed), "rule 6: a unit's gradients are flushed before its token has run");
    }
}
