//! [`ShrunkWorld`]: the world of those that go on after a failure.

use std::sync::Arc;

use super::Backend;

/// The world of the ranks that have gone on from another.
#[derive(Debug, Clone)]
pub struct ShrunkWorld {
    /// What connects them.
    pub engine: Arc<dyn Backend>,
    /// What each of them was there: its rank `i` is the other's `ranks[i]`. Ascending.
    pub ranks: Arc<[usize]>,
}

impl ShrunkWorld {
    /// What the other world's `rank` is here.
    pub fn place_of(&self, rank: usize) -> Option<usize> {
        self.ranks.binary_search(&rank).ok()
    }
}

/// The worlds that `rank` of `engine` has been in, and its rank there: this one, and those that it has gone on in.
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

/// The last world that ranks of this process have gone on in from that of `engine`.
pub(in crate::comm) fn last(engine: Arc<dyn Backend>) -> Arc<dyn Backend> {
    let next = |engine: &Arc<dyn Backend>| engine.successor().map(|successor| successor.engine);
    std::iter::successors(Some(engine), next).last().expect("there is the first")
}
