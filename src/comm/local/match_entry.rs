//! [`MatchEntry`]: one collective of a group, until every rank has taken its result.

use super::{Parts, Signature};

/// Urgency with which local ranks need a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    Later,
    /// Prefetched: needed after a result that is needed now.
    Next,
    Now,
}

/// For each member that has posted, its signature, and its contribution until the collective is complete.
pub(super) type Posts<F, P> = Vec<Option<(F, Option<P>)>>;

pub(super) struct MatchEntry<F, P> {
    pub(super) joined: Posts<F, P>,
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
    pub(super) parts: Option<Parts<P>>,
    pub(super) unreleased: usize,
    /// Urgency with which offered contributions are needed.
    pub(super) wanted: Wanted,
    /// Members whose contributions are offered and have not been requested.
    pub(super) offered: Vec<usize>,
    /// True for an internal part of another call, which is not reported.
    pub(super) is_internal: bool,
}

impl<F: Signature, P> MatchEntry<F, P> {
    /// Creates the entry of a collective of `size` ranks. `spare` is the empty vector of an earlier collective, or
    /// a new one.
    pub(super) fn new(size: usize, spare: Posts<F, P>) -> Self {
        let mut joined = spare;
        joined.resize_with(size, || None);
        Self {
            joined,
            first: size,
            expected: size,
            absent: size,
            waits: 0,
            last: 0,
            parts: None,
            unreleased: size,
            wanted: Wanted::Later,
            offered: Vec::new(),
            is_internal: false,
        }
    }

    /// If `print` differs from the signatures present, returns the member at fault and a member that it differs
    /// from.
    ///
    /// All members present agree so far. With two or more of them, `member` is therefore the one that deviates, and
    /// it suffices to compare with one of them.
    pub(super) fn suspect(&self, member: usize, print: &F) -> Option<(usize, usize)> {
        let present = self.joined.iter().enumerate().skip(self.first);
        let present = present.filter_map(|(i, joined)| Some((i, &joined.as_ref()?.0)));
        let mut asked = present.take(if print.is_of_pairs() { self.joined.len() } else { 1 });
        asked.find_map(|(present, other)| print.difference(other).map(|_| (member, present)))
    }

    /// Returns true if `member` has posted and its contribution has not arrived.
    pub(super) fn awaits(&self, member: usize) -> bool {
        self.joined.get(member).is_some_and(|joined| matches!(joined, Some((_, None)))) && self.parts.is_none()
    }

    /// Adds a contribution.
    pub(super) fn put(&mut self, member: usize, part: P) {
        let (_, deposit) = self.joined[member].as_mut().expect("the member has posted");
        *deposit = Some(part);
        self.absent -= 1;
        self.last = member;
    }

    /// Takes the contributions that have arrived.
    pub(super) fn deposits(&mut self) -> Parts<P> {
        self.joined.iter_mut().flatten().filter_map(|(_, part)| part.take()).collect()
    }

    /// Completes the collective if all contributions have arrived: moves them to `parts`. Returns true if so.
    pub(super) fn complete(&mut self) -> bool {
        if self.absent > 0 {
            return false;
        }
        let parts = self.joined.iter_mut().map(|joined| {
            let (_, part) = joined.as_mut().expect("every member has posted");
            part.take().expect("a collective completes once")
        });
        self.parts = Some(parts.collect());
        true
    }
}
