//! [`Digests`]: digests of values that must be bit-identical on all ranks of a group.
//!
//! They are sent with the signature of a collective that the ranks make anyway. They are compared
//! when all ranks have joined, because only then is the value of the majority known.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{CollectiveId, CommError, ReplicatedValue};

/// Digests of values that must be bit-identical on all ranks of a group.
///
/// If the digests of two ranks describe different values, the ranks fail with
/// [`Mismatch`](CommError::Mismatch), as for any other difference between calls. If the digests
/// themselves differ, they fail with [`CommError::Diverged`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Digests {
    /// Kind of the values.
    pub of: ReplicatedValue,
    /// Step number of the values.
    pub step: u64,
    /// Names of the values, such as parameter paths.
    pub names: Arc<[Arc<str>]>,
    /// Digest of each named value; `None` for a value that the rank cannot read, such as one on
    /// another device.
    pub values: Arc<[Option<u64>]>,
}

/// Displays as `weights of step 10: a, b`.
impl fmt::Display for Digests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            of, step, names, ..
        } = self;
        write!(f, "{of}s of step {step}: {}", names.join(", "))
    }
}

impl Digests {
    /// Returns true if both describe the same values: kind, step and names.
    pub(crate) fn are_of_the_same(&self, other: &Self) -> bool {
        (self.of, self.step, &self.names) == (other.of, other.step, &other.names)
    }
}

/// A difference between ranks in a value that must be identical on all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Divergence {
    /// Group rank whose value differs.
    member: usize,
    /// Group rank of a rank with another value.
    other: usize,
    /// True if most ranks hold the value of `other`.
    majority: bool,
    of: ReplicatedValue,
    step: u64,
    name: Arc<str>,
}

impl Divergence {
    /// Returns the first divergence, or `None`. `ranks` yields the digests of each rank in group
    /// order; all must describe the same values.
    pub(crate) fn among<'a>(ranks: impl Iterator<Item = &'a [Digests]> + Clone) -> Option<Self> {
        let first = ranks.clone().next()?;
        let names = first.iter().enumerate().flat_map(|(list, digests)| {
            digests
                .names
                .iter()
                .enumerate()
                .map(move |(at, name)| (digests, name, list, at))
        });
        names
            .into_iter()
            .find_map(|(Digests { of, step, .. }, name, list, at)| {
                let held = ranks.clone().map(|lists| *lists.get(list)?.values.get(at)?);
                let Vote {
                    member,
                    other,
                    majority,
                } = vote(held)?;
                Some(Self {
                    member,
                    other,
                    majority,
                    of: *of,
                    step: *step,
                    name: name.clone(),
                })
            })
    }

    /// Returns the error that all ranks receive. `ranks` are the global ranks of the group, and
    /// `during` is the collective in which the divergence was found.
    pub fn error(self, ranks: &[usize], during: CollectiveId) -> CommError {
        let Self {
            member,
            other,
            majority,
            of,
            step,
            name,
        } = self;
        let rank = ranks[member];
        let other = ranks[other];
        let param = name.to_string();
        CommError::Diverged {
            rank,
            other,
            during,
            param,
            of,
            step,
            majority,
        }
    }
}

/// Result of comparing one value: the member that differs, and a member with another value.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Vote {
    pub(crate) member: usize,
    pub(crate) other: usize,
    /// True if most members hold the value of `other`.
    pub(crate) majority: bool,
}

/// Compares the digests of all members; a `None` does not vote. Returns `None` if all known digests
/// are identical.
pub(crate) fn vote(held: impl Iterator<Item = Option<u64>> + Clone) -> Option<Vote> {
    let known = held
        .enumerate()
        .filter_map(|(member, value)| Some((member, value?)));
    let (first, value) = known.clone().next()?;
    let differs = |from: u64| {
        known
            .clone()
            .find(|(_, value)| *value != from)
            .map(|(member, _)| member)
    };
    let second = differs(value)?;
    // Boyer-Moore majority vote: a majority survives when its digests are paired off with all
    // others.
    let (survivor, _) = known
        .clone()
        .fold((value, 0), |(survivor, count), (_, value)| {
            match (count, value == survivor) {
                (0, _) => (value, 1),
                (count, true) => (survivor, count + 1),
                (count, false) => (survivor, count - 1),
            }
        });
    let holders = known.clone().filter(|(_, value)| *value == survivor);
    if 2 * holders.clone().count() <= known.clone().count() {
        return Some(Vote {
            member: second,
            other: first,
            majority: false,
        });
    }
    let (other, _) = holders.clone().next()?;
    Some(Vote {
        member: differs(survivor)?,
        other,
        majority: true,
    })
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
        assert_eq!(
            of(&[8, 9, 7, 7, 7]),
            Some((0, 2, true)),
            "the first of several"
        );
        assert_eq!(of(&[7, 8, 7, 9, 7]), Some((1, 0, true)));
    }

    #[test]
    fn of_two_or_of_halves_no_rank_is() {
        assert_eq!(of(&[7, 8]), Some((1, 0, false)));
        assert_eq!(of(&[7, 7, 8, 8]), Some((2, 0, false)));
        assert_eq!(of(&[7, 8, 9]), Some((1, 0, false)));
        assert_eq!(
            of(&[7, 8, 8, 9]),
            Some((1, 0, false)),
            "half is not a majority"
        );
    }

    /// In these tests, zero stands for an unknown digest.
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
            [
                digests(ReplicatedValue::Gradient, 2, [1, gradient]),
                digests(ReplicatedValue::Weight, 3, weights),
            ]
        };
        let among = |ranks: &[[Digests; 2]]| Divergence::among(ranks.iter().map(|rank| &rank[..]));
        assert_eq!(among(&[rank(2, [3, 4]), rank(2, [3, 4])]), None);
        let found = among(&[rank(2, [3, 4]), rank(2, [9, 4]), rank(2, [3, 4])]).unwrap();
        assert_eq!(
            (found.member, &*found.name, found.of, found.step),
            (1, "a", ReplicatedValue::Weight, 3)
        );
        let found = among(&[rank(2, [3, 4]), rank(8, [9, 9])]).unwrap();
        assert_eq!(
            (found.other, &*found.name, found.of, found.step),
            (0, "b", ReplicatedValue::Gradient, 2)
        );
        assert_eq!(Divergence::among([&[][..], &[]].into_iter()), None);
    }
}
