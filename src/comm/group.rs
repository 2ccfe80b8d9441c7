//! [`Group`]: an ordered set of ranks.

use std::sync::Arc;

/// An ordered set of global ranks and the caller's place in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    ranks: Arc<[usize]>,
    index: usize,
}

impl Group {
    /// The group `ranks` seen from the rank at position `index`.
    ///
    /// # Panics
    /// If `index` is not a position in `ranks`.
    pub fn new(ranks: impl Into<Arc<[usize]>>, index: usize) -> Self {
        let ranks = ranks.into();
        assert!(index < ranks.len(), "group rank {index} is outside a group of {} ranks", ranks.len());
        Self { ranks, index }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The caller's rank inside the group.
    pub fn rank(&self) -> usize {
        self.index
    }

    pub(super) fn shared_ranks(&self) -> Arc<[usize]> {
        self.ranks.clone()
    }

    /// The place in the group of global rank `rank`, if it is in it.
    pub fn group_rank_of(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|other| *other == rank)
    }

    /// Global ranks in group order: `ranks()[place]` is the global rank of a place.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }
}

impl std::fmt::Display for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ranks {:?}", self.ranks)
    }
}
