//! [`Digests`]: of values that every rank of a group must hold alike, to the bit.
//!
//! They travel with the fingerprint of a collective that is made anyway, and are compared once all its ranks have joined:
//! only then is it known what most of them hold.

use std::fmt;
use std::sync::Arc;

use super::{CollectiveId, CommError, ReplicatedValue};

/// Digests of values that every rank of a group must hold alike, to the bit.
///
/// Ranks whose digests are of other things are told as of any other [`Mismatch`](CommError::Mismatch); ranks whose digests
/// differ, by [`CommError::Diverged`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Digests {
    /// What they are of.
    pub of: ReplicatedValue,
    /// When that was: the number of a step.
    pub step: u64,
    /// Names of the values, such as the parameters' paths.
    pub names: Arc<[Arc<str>]>,
    /// One for each name; `None` for a value that the rank cannot look at, such as one on another device.
    pub values: Arc<[Option<u64>]>,
}

/// `weights of step 10: a, b`
impl fmt::Display for Digests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, step, names, .. } = self;
        write!(f, "{of}s of step {step}: {}", names.join(", "))
    }
}

impl Digests {
    /// Whether they are of the same things.
    pub(crate) fn are_of_the_same(&self, other: &Self) -> bool {
        (self.of, self.step, &self.names) == (other.of, other.step, &other.names)
    }
}

/// A rank that holds another value than others, of what all must hold alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Divergence {
    /// Its place in the group.
    member: usize,
    /// A place of a rank that it differs from.
    other: usize,
    /// Whether most hold what that one does.
    majority: bool,
    of: ReplicatedValue,
    step: u64,
    name: Arc<str>,
}

impl Divergence {
    /// The first among ranks whose digests are of the same things, of each rank of a group in its order.
    pub(crate) fn among<'a>(ranks: impl Iterator<Item = &'a [Digests]> + Clone) -> Option<Self> {
        let first = ranks.clone().next()?;
        let names = first.iter().enumerate().flat_map(|(list, digests)| {
            digests.names.iter().enumerate().map(move |(at, name)| (digests, name, list, at))
        });
        names.into_iter().find_map(|(Digests { of, step, .. }, name, list, at)| {
            let held = ranks.clone().map(|lists| *lists.get(list)?.values.get(at)?);
            let Vote { member, other, majority } = vote(held)?;
            Some(Self { member, other, majority, of: *of, step: *step, name: name.clone() })
        })
    }

    /// What all ranks are told: those of the group are `ranks`, and the collective that brought it to light is `during`.
    pub fn error(self, ranks: &[usize], during: CollectiveId) -> CommError {
        let Self { member, other, majority, of, step, name } = self;
        let (rank, other, param) = (ranks[member], ranks[other], name.to_string());
        CommError::Diverged { rank, other, during, param, of, step, majority }
    }
}

/// Who holds another value, than whom.
#[derive(Debug, PartialEq, Eq)]
struct Vote {
    member: usize,
    other: usize,
    majority: bool,
}

/// Of what each member holds, if that is known; `None` if all is alike.
fn vote(held: impl Iterator<Item = Option<u64>> + Clone) -> Option<Vote> {
    let known = held.enumerate().filter_map(|(member, value)| Some((member, value?)));
    let (first, value) = known.clone().next()?;
    let differs = |from: u64| known.clone().find(|(_, value)| *value != from).map(|(member, _)| member);
    let second = differs(value)?;
    // Whatever most hold outlives all others, paired off with it (Boyer and Moore).
    let (survivor, _) =
        known.clone().fold((value, 0), |(survivor, count), (_, value)| match (count, value == survivor) {
            (0, _) => (value, 1),
            (count, true) => (survivor, count + 1),
            (count, false) => (survivor, count - 1),
        });
    let holders = known.clone().filter(|(_, value)| *value == survivor);
    if 2 * holders.clone().count() <= known.clone().count() {
        return Some(Vote { member: second, other: first, majority: false });
    }
    let (other, _) = holders.clone().next()?;
    Some(Vote { member: differs(survivor)?, other, majority: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(held: &[u64]) -> Option<(usize, usize, bool)> {
        let vote = vote(held.iter().map(|held| (*held > 0).then_some(*held)))?;
        Some((vote.member, vote.other, vote.majority))
    }

    #[test]
    fn ranks_outside_the_majority_are_named() {
        assert_eq!(of(&[7; 5]), None);
        for culprit in 0..3 {
            let mut held = [7; 3];
            held[culprit] = 8;
            assert_eq!(of(&held), Some((culprit, usize::from(culprit == 0), true)));
        }
        assert_eq!(of(&[8, 9, 7, 7, 7]), Some((0, 2, true)), "the first of several");
        assert_eq!(of(&[7, 8, 7, 9, 7]), Some((1, 0, true)));
    }

    #[test]
    fn of_two_or_of_halves_no_rank_is() {
        assert_eq!(of(&[7, 8]), Some((1, 0, false)));
        assert_eq!(of(&[7, 7, 8, 8]), Some((2, 0, false)));
        assert_eq!(of(&[7, 8, 9]), Some((1, 0, false)));
        assert_eq!(of(&[7, 8, 8, 9]), Some((1, 0, false)), "half is not most");
    }

    /// Zero stands for what is not known.
    #[test]
    fn who_knows_nothing_has_no_vote() {
        assert_eq!(of(&[0, 0, 0]), None);
        assert_eq!(of(&[0, 7, 0]), None);
        assert_eq!(of(&[0, 7, 8]), Some((2, 1, false)));
        assert_eq!(of(&[8, 0, 7, 7]), Some((0, 2, true)));
    }

    #[test]
    fn the_first_value_that_differs_is_named() {
        let digests = |of, step, values: [u64; 2]| Digests {
            of,
            step,
            names: ["a".into(), "b".into()].into(),
            values: values.map(Some).into(),
        };
        let rank = |gradient, weights| {
            [digests(ReplicatedValue::Gradient, 2, [1, gradient]), digests(ReplicatedValue::Weight, 3, weights)]
        };
        let among = |ranks: &[[Digests; 2]]| Divergence::among(ranks.iter().map(|rank| &rank[..]));
        assert_eq!(among(&[rank(2, [3, 4]), rank(2, [3, 4])]), None);
        let found = among(&[rank(2, [3, 4]), rank(2, [9, 4]), rank(2, [3, 4])]).unwrap();
        assert_eq!((found.member, &*found.name, found.of, found.step), (1, "a", ReplicatedValue::Weight, 3));
        let found = among(&[rank(2, [3, 4]), rank(8, [9, 9])]).unwrap();
        assert_eq!((found.other, &*found.name, found.of, found.step), (0, "b", ReplicatedValue::Gradient, 2));
        assert_eq!(Divergence::among([&[][..], &[]].into_iter()), None);
    }
}
