//! [`ShrunkWorld`]: what [`Backend::shrink`](super::Backend::shrink) returns.

use std::sync::Arc;

use super::Backend;

/// The world of the ranks that survived a failure of another world.
#[derive(Debug, Clone)]
pub struct ShrunkWorld {
    /// Backend of the new world.
    pub engine: Arc<dyn Backend>,
    /// Old rank of each new rank, ascending: rank `i` of the new world was rank `ranks[i]` of the old one.
    pub ranks: Arc<[usize]>,
}

impl ShrunkWorld {
    /// Returns the new rank of the old rank `rank`, or `None` if it did not survive.
    pub fn place_of(&self, rank: usize) -> Option<usize> {
        self.ranks.binary_search(&rank).ok()
    }
}
