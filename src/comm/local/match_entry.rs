//! [`MatchEntry`]: one collective of a group, until every rank has taken its result.

use super::{Parts, Signature};

/// When the ranks here want a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    Later,
    /// After one that is wanted now.
    Next,
    Now,
}

/// Of each member that has joined the print, and the deposit until it is handed out.
pub(super) type Posts<F, P> = Vec<Option<(F, Option<P>)>>;

pub(super) struct MatchEntry<F, P> {
    pub(super) joined: Posts<F, P>,
    /// The first member that has joined, in group order.
    pub(super) first: usize,
    /// How many members have not joined.
    pub(super) expected: usize,
    /// How many deposits are missing.
    pub(super) absent: usize,
    /// The member whose deposit came most recently: of a complete collective the last.
    pub(super) last: usize,
    /// How many waits began before it was complete.
    pub(super) waits: usize,
    pub(super) parts: Option<Parts<P>>,
    pub(super) unreleased: usize,
    /// Of what is offered.
    pub(super) wanted: Wanted,
    /// Members whose deposits are offered, and have not been asked for.
    pub(super) offered: Vec<usize>,
}

impl<F: Signature, P> MatchEntry<F, P> {
    /// For a group of `size`, of which `spare` are places that an earlier collective has left empty, or nothing.
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
        }
    }

    /// If `print` differs from those present: the member to blame, and one it differs from.
    ///
    /// Everyone present agreed so far, so with two or more present `member` is the odd one out, and one of
    /// them stands for all.
    pub(super) fn suspect(&self, member: usize, print: &F) -> Option<(usize, usize)> {
        let present = self.joined.iter().enumerate().skip(self.first);
        let present = present.filter_map(|(i, joined)| Some((i, &joined.as_ref()?.0)));
        let mut asked = present.take(if print.is_of_pairs() { self.joined.len() } else { 1 });
        asked.find_map(|(present, other)| print.difference(other).map(|_| (member, present)))
    }

    /// Whether `member` has joined, and its deposit has yet to come.
    pub(super) fn awaits(&self, member: usize) -> bool {
        self.joined.get(member).is_some_and(|joined| matches!(joined, Some((_, None)))) && self.parts.is_none()
    }

    /// Adds a deposit.
    pub(super) fn put(&mut self, member: usize, part: P) {
        let (_, deposit) = self.joined[member].as_mut().expect("the member has joined");
        *deposit = Some(part);
        self.absent -= 1;
        self.last = member;
    }

    /// Takes the deposits that are there.
    pub(super) fn deposits(&mut self) -> Parts<P> {
        self.joined.iter_mut().flatten().filter_map(|(_, part)| part.take()).collect()
    }

    /// Hands the deposits out once all are there.
    pub(super) fn complete(&mut self) -> bool {
        if self.absent > 0 {
            return false;
        }
        let parts = self.joined.iter_mut().map(|joined| {
            let (_, part) = joined.as_mut().expect("every member has joined");
            part.take().expect("a collective completes once")
        });
        self.parts = Some(parts.collect());
        true
    }
}
