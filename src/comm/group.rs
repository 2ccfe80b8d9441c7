//! [`Group`]: an ordered list of ranks.

use std::sync::Arc;

/// An ordered list of global ranks, and the caller's position in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    ranks: Arc<[usize]>,
    index: usize,
}

impl Group {
    /// Creates the group of the global ranks `ranks`, for the rank at position `index`.
    ///
    /// # Panics
    /// If `index` is not a position in `ranks`.
    pub fn new(ranks: impl Into<Arc<[usize]>>, index: usize) -> Self {
        let ranks = ranks.into();
        assert!(
            index < ranks.len(),
            "group rank {index} is outside a group of {} ranks",
            ranks.len()
        );
        Self { ranks, index }
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the caller's group rank.
    pub fn rank(&self) -> usize {
        self.index
    }

    pub(super) fn shared_ranks(&self) -> Arc<[usize]> {
        self.ranks.clone()
    }

    /// Returns the group rank of the global rank `rank`, or `None` if it is not a member.
    pub fn group_rank_of(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|other| *other == rank)
    }

    /// Returns the global ranks in group order: `ranks()[i]` is the global rank of group rank `i`.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }
}

impl std::fmt::Display for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ranks {:?}", self.ranks)
    }
}
