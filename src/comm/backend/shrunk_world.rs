//! [`ShrunkWorld`]: the world of the ranks that survive a failure.

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

/// Iterates over the worlds of which `rank` has been a member, each with its rank there: the world of `engine`, and
/// the worlds in which it continued.
pub(in crate::comm) fn worlds(
    engine: Arc<dyn Backend>,
    rank: usize,
) -> impl Iterator<Item = (Arc<dyn Backend>, usize)> {
    std::iter::successors(Some((engine, rank)), |(engine, rank)| {
        let successor = engine.successor()?;
        let place = successor.place_of(*rank)?;
        Some((successor.engine, place))
    })
}

/// Returns the last world in which ranks of this process continued, starting from the world of `engine`; the same
/// world if they did not.
pub(in crate::comm) fn last(engine: Arc<dyn Backend>) -> Arc<dyn Backend> {
    let next = |engine: &Arc<dyn Backend>| engine.successor().map(|successor| successor.engine);
    std::iter::successors(Some(engine), next).last().expect("the first world always exists")
}
