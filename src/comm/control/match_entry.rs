//! [`MatchEntry`]: one collective of a group, until every rank has taken its result.

use super::{Parts, Signature};

pub(super) struct MatchEntry<F, P> {
    /// For each member that has posted, its signature, and its contribution until the collective is
    /// complete.
    pub(super) posts: Vec<Option<(F, Option<P>)>>,
    /// First member, in group order, that has posted.
    pub(super) first: usize,
    /// Number of members that have not posted.
    pub(super) expected: usize,
    /// Number of contributions that are missing.
    pub(super) absent: usize,
    /// Member whose contribution arrived last.
    pub(super) last: usize,
    /// Number of waits that began before the collective was complete.
    pub(super) waits: usize,
    /// The contributions of all members, once the collective is complete.
    pub(super) parts: Option<Parts<P>>,
    pub(super) unreleased: usize,
    /// True if a local rank needs the offered contributions now.
    pub(super) is_wanted: bool,
    /// Members whose contributions are offered and have not been requested.
    pub(super) offered: Vec<usize>,
    /// True for an internal part of another call, which is not reported.
    pub(super) is_internal: bool,
}

impl<F: Signature, P> MatchEntry<F, P> {
    /// Creates the entry of a collective of `size` ranks.
    pub(super) fn new(size: usize) -> Self {
        let posts = (0..size).map(|_| None).collect();
        let expected = size;
        let absent = size;
        let unreleased = size;
        let first = size;
        let waits = 0;
        let last = 0;
        let parts = None;
        let offered = Vec::new();
        let is_wanted = false;
        let is_internal = false;
        Self {
            posts,
            first,
            expected,
            absent,
            last,
            waits,
            parts,
            unreleased,
            is_wanted,
            offered,
            is_internal,
        }
    }

    /// Adds the call of `member`. If its signature differs from those present, returns a member
    /// that it differs from.
    ///
    /// All members present agree so far. With two or more of them, `member` is therefore the one
    /// that deviates, and it suffices to compare with one of them.
    pub(super) fn post(&mut self, member: usize, signature: F) -> Option<usize> {
        let present = self.posts.iter().enumerate().skip(self.first);
        let present = present.filter_map(|(i, post)| Some((i, &post.as_ref()?.0)));
        let mut asked = present.take(if signature.is_of_pairs() {
            self.posts.len()
        } else {
            1
        });
        let other = asked
            .find(|(_, other)| signature.difference(other).is_some())
            .map(|(other, _)| other);
        self.posts[member] = Some((signature, None));
        self.expected -= 1;
        self.first = self.first.min(member);
        other
    }

    /// Returns true if `member` has posted and its contribution has not arrived.
    pub(super) fn awaits(&self, member: usize) -> bool {
        self.posts
            .get(member)
            .is_some_and(|post| matches!(post, Some((_, None))))
            && self.parts.is_none()
    }

    /// Takes the contributions that have arrived.
    pub(super) fn take_parts(&mut self) -> Parts<P> {
        self.parts.take().unwrap_or_else(|| {
            self.posts
                .iter_mut()
                .flatten()
                .filter_map(|(_, part)| part.take())
                .collect()
        })
    }
}
