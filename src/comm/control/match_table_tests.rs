//! Tests of [`MatchTable`], by its invariants.

use std::sync::Weak;

use crate::comm::{Digests, ReplicatedValue};

use super::*;

/// A signature of an operation and a label; signatures with two labels differ.
#[derive(Debug, Clone)]
pub(super) struct Name(pub &'static str);

impl Signature for Name {
    fn op(&self) -> Op {
        Op::Barrier
    }

    fn label(&self) -> Arc<str> {
        self.0.into()
    }

    fn difference(&self, other: &Self) -> Option<String> {
        (self.0 != other.0).then(|| format!("label `{}` vs `{}`", self.0, other.0))
    }
}

pub(super) type Plain = MatchTable<Name, usize>;

pub(super) fn board(ranks: usize) -> (Plain, GroupKey) {
    let mut board = Plain::new(ranks, false);
    let all: Vec<_> = (0..ranks).collect();
    let group = board.group(&all, "");
    (board, group)
}

fn ready(board: &mut Plain, ticket: OpHandle) -> Option<Vec<usize>> {
    match board.poll(ticket) {
        Poll::Ready(parts) => Some(parts.to_vec()),
        _ => None,
    }
}

pub(super) fn failure(board: &Plain) -> CommError {
    board.failure().expect("the world has failed").error(None)
}

#[test]
fn invariants_1_and_2_nth_calls_meet_and_complete_with_the_last() {
    let (mut board, group) = board(3);
    let mut tickets = [Vec::new(), Vec::new(), Vec::new()];
    // Rank 0 posts three calls before the others.
    for member in [0, 0, 0, 1, 2, 2, 1, 1, 2] {
        let nth = tickets[member].len();
        let (ticket, complete) = board
            .post(group, member, Name("x"), 10 * nth + member)
            .unwrap();
        tickets[member].push(ticket);
        let joined = tickets.iter().filter(|tickets| tickets.len() > nth).count();
        assert_eq!(complete, joined == 3);
    }
    for nth in 0..3 {
        for tickets in &tickets {
            assert_eq!(
                ready(&mut board, tickets[nth]),
                Some(vec![10 * nth, 10 * nth + 1, 10 * nth + 2])
            );
        }
    }
}

#[test]
fn the_last_to_join_is_named_by_its_global_rank() {
    let mut board = Plain::new(4, false);
    let group = board.group(&[3, 0, 2], "");
    let mut tickets = Vec::new();
    // Member 1 posts both calls first: the first call ends with member 2, the second with member 0.
    for member in [1, 1, 0, 2, 2, 0] {
        tickets.push(board.post(group, member, Name("x"), 0).unwrap().0);
    }
    let last = |ticket: &OpHandle| board.last(*ticket);
    assert_eq!(
        tickets.iter().map(last).collect::<Vec<_>>(),
        [2, 3, 2, 2, 3, 3]
    );
}

/// A table whose contributions are only counted references, to check which of them are alive.
struct Watched(MatchTable<Name, Arc<()>>, GroupKey, Vec<Vec<Weak<()>>>);

impl Watched {
    fn new() -> Self {
        let mut board = MatchTable::new(2, false);
        let group = board.group(&[0, 1], "");
        Self(board, group, Vec::new())
    }

    /// Posts the next collective on its first `joined` ranks.
    fn join(&mut self, joined: usize) -> Vec<OpHandle> {
        let parts: Vec<_> = (0..joined).map(|_| Arc::new(())).collect();
        self.2.push(parts.iter().map(Arc::downgrade).collect());
        parts
            .into_iter()
            .enumerate()
            .map(|(member, part)| self.0.post(self.1, member, Name("x"), part).unwrap().0)
            .collect()
    }

    /// Drops the freed contributions, and returns for each collective whether its contributions are
    /// alive.
    fn alive(&mut self) -> Vec<bool> {
        drop(self.0.take_freed());
        self.2
            .iter()
            .map(|parts| parts.iter().any(|part| part.upgrade().is_some()))
            .collect()
    }
}

#[test]
fn invariant_3_deposits_go_when_all_have_taken_theirs() {
    let mut watched = Watched::new();
    let tickets: Vec<_> = (0..3).flat_map(|_| watched.join(2)).collect();
    // The collectives in the middle and at the end are released first, and do not wait for others.
    for (ticket, alive) in [
        (2, [true, true, true]),
        (3, [true, false, true]),
        (4, [true, false, true]),
        (5, [true, false, false]),
        (0, [true, false, false]),
        (1, [false, false, false]),
    ] {
        watched.0.release(tickets[ticket]);
        assert_eq!(watched.alive(), alive, "after ticket {ticket}");
    }
    assert!(watched.0.groups[0].entries.is_empty());
    // A collective that is never released does not keep later ones alive.
    watched.join(2);
    let later = watched.join(2);
    later
        .into_iter()
        .for_each(|ticket| watched.0.release(ticket));
    let kept = |slot: &MatchEntry<_, _>| slot.posts.iter().flatten().count();
    assert_eq!(
        watched.0.groups[0]
            .entries
            .iter()
            .map(kept)
            .collect::<Vec<_>>(),
        [2, 0]
    );
    assert_eq!(watched.join(1)[0].seq, 5);
}

#[test]
fn invariant_3_a_failure_frees_what_it_leaves_incomplete() {
    let mut watched = Watched::new();
    let complete = watched.join(2);
    let incomplete = watched.join(1);
    assert_eq!(watched.alive(), [true, true]);
    watched.0.fail(Failure::Panicked {
        rank: 1,
        message: String::new(),
    });
    assert_eq!(watched.alive(), [true, false]);
    assert!(matches!(watched.0.poll(complete[0]), Poll::Ready(_)));
    assert!(matches!(watched.0.poll(incomplete[0]), Poll::Failed));
    [complete[0], complete[1], incomplete[0]]
        .into_iter()
        .for_each(|ticket| watched.0.release(ticket));
    assert_eq!(watched.alive(), [false, false]);
}

/// Also if the last rank to post is the one that differs, so that no rank is absent.
#[test]
fn invariant_3_a_mismatch_frees_what_it_is_about() {
    let mut watched = Watched::new();
    watched.join(1);
    let part = Arc::new(());
    let group = watched.1;
    watched.2.push(vec![Arc::downgrade(&part)]);
    watched.0.post(group, 1, Name("y"), part).unwrap_err();
    assert_eq!(watched.alive(), [false, false]);
    let late = Arc::new(());
    watched.2.push(vec![Arc::downgrade(&late)]);
    watched.0.post(group, 0, Name("x"), late).unwrap_err();
    assert_eq!(
        watched.2[2][0].strong_count(),
        1,
        "it is dropped outside the lock"
    );
    assert_eq!(watched.alive(), [false; 3]);
}

#[test]
fn invariant_4_the_first_failure_is_final_and_joint() {
    let (mut board, group) = board(3);
    let pair = board.group(&[0, 2], "");
    board.fail(Failure::Panicked {
        rank: 1,
        message: "first".into(),
    });
    board.fail(Failure::Panicked {
        rank: 2,
        message: "second".into(),
    });
    for group in [group, pair] {
        let error = board.post(group, 0, Name("x"), 0).unwrap_err();
        assert!(
            matches!(error, CommError::RankPanicked { rank: 1, ref message, during: Some(_) } if message == "first")
        );
    }
}

#[test]
fn a_complete_collective_is_ready_even_after_a_failure() {
    let (mut board, group) = board(2);
    let (ticket, _) = board.post(group, 0, Name("x"), 5).unwrap();
    board.post(group, 1, Name("x"), 6).unwrap();
    board.fail(Failure::Panicked {
        rank: 1,
        message: String::new(),
    });
    assert_eq!(ready(&mut board, ticket), Some(vec![5, 6]));
}

#[test]
fn of_three_ranks_the_one_outside_the_majority_is_named() {
    let (mut board, group) = board(4);
    board.post(group, 3, Name("x"), 0).unwrap();
    board.post(group, 0, Name("x"), 0).unwrap();
    let error = board.post(group, 2, Name("y"), 0).unwrap_err();
    let CommError::Mismatch {
        rank,
        other,
        differs,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (*rank, *other, differs.as_str()),
        (2, 0, "label `y` vs `x`")
    );
    assert_eq!(
        board.post(group, 1, Name("x"), 0).unwrap_err(),
        error,
        "a later rank gets the same error"
    );
}

#[test]
fn groups_are_told_apart_by_ranks_order_and_name() {
    let (mut board, group) = board(3);
    let others = [
        board.group(&[2, 1, 0], ""),
        board.group(&[0, 1], ""),
        board.group(&[0, 1, 2], "copy"),
    ];
    assert_eq!(
        [board.group(&[0, 1, 2], ""), board.group(&[0, 1, 2], "copy")],
        [group, others[2]]
    );
    assert!(
        others.iter().all(|other| *other != group)
            && others[0] != others[1]
            && others[1] != others[2]
    );
}

#[test]
fn doing_is_what_it_was_at_the_failure() {
    let (mut board, group) = board(3);
    assert_eq!(board.activity(0), "computing, before any collective");
    let (ticket, _) = board.post(group, 0, Name("x"), 0).unwrap();
    assert_eq!(
        board.activity(0),
        "computing since barrier #0 `x` on ranks [0, 1, 2]"
    );
    board.begin_wait(Wait::All(ticket));
    board.fail(Failure::Panicked {
        rank: 1,
        message: String::new(),
    });
    board.end_wait(0, Wait::All(ticket));
    board.returned(0);
    assert_eq!(
        board.activity(0),
        "waiting in barrier #0 `x` on ranks [0, 1, 2] for ranks [1, 2]"
    );
}

/// A rank that waits for one collective after it has posted the next one, as a unit and a prefetch,
/// computes with the result of the former.
#[test]
fn a_rank_computes_since_the_collective_whose_result_it_took() {
    let (mut board, group) = board(2);
    let [unit, next] =
        ["unit", "next"].map(|label| board.post(group, 0, Name(label), 0).unwrap().0);
    board.post(group, 1, Name("unit"), 0).unwrap();
    assert_eq!(
        board.activity(0),
        "computing since barrier #1 `next` on ranks [0, 1]"
    );
    assert!(matches!(board.poll(unit), Poll::Ready(_)));
    assert_eq!(
        board.activity(0),
        "computing since barrier #0 `unit` on ranks [0, 1]"
    );
    assert!(matches!(board.poll(next), Poll::Pending));
    assert_eq!(
        board.activity(0),
        "computing since barrier #0 `unit` on ranks [0, 1]"
    );
}

/// Values that a rank expects of each other rank, by group rank. Two ranks agree if both expect the
/// same of each other.
struct Expects(usize, [u8; 3]);

impl Signature for Expects {
    fn op(&self) -> Op {
        Op::AllToAllList
    }

    fn label(&self) -> Arc<str> {
        "".into()
    }

    fn difference(&self, other: &Self) -> Option<String> {
        let a = self.1[other.0];
        let b = other.1[self.0];
        (a != b).then(|| format!("{a} vs {b}"))
    }

    fn is_of_pairs(&self) -> bool {
        true
    }
}

#[test]
fn invariant_2_agreements_of_pairs_are_checked_with_all_who_are_there() {
    let mut board = MatchTable::new(3, false);
    let group = board.group(&[0, 1, 2], "");
    board.post(group, 0, Expects(0, [0, 1, 2]), 0).unwrap();
    board.post(group, 1, Expects(1, [1, 0, 3]), 0).unwrap();
    // Rank 2 agrees with the first rank that has posted, and not with the second.
    let error = board.post(group, 2, Expects(2, [2, 4, 0]), 0).unwrap_err();
    let CommError::Mismatch {
        rank: 2,
        other: 1,
        differs,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(differs, "4 vs 3");
}

/// Values that a rank holds, to be compared with those of other ranks.
pub(super) struct Holds(Vec<Digests>);

impl Holds {
    pub fn of(value: u64) -> Self {
        let names = ["a".into()].into();
        let values = [Some(value)].into();
        Self(vec![Digests {
            of: ReplicatedValue::Weight,
            step: 3,
            names,
            values,
        }])
    }
}

impl Signature for Holds {
    fn op(&self) -> Op {
        Op::AllReduce
    }

    fn label(&self) -> Arc<str> {
        "x".into()
    }

    fn difference(&self, _: &Self) -> Option<String> {
        None
    }

    fn divergence<'a>(signatures: impl Iterator<Item = &'a Self> + Clone) -> Option<Divergence> {
        Divergence::among(signatures.map(|signature| &signature.0[..]))
    }
}

/// In any order of ranks: the rank at fault is known only when the last has posted.
#[test]
fn invariant_2_replicated_values_are_compared_when_the_last_has_posted() {
    for order in [[0, 1, 2], [1, 2, 0], [2, 0, 1]] {
        for culprit in 0..3 {
            let mut board = MatchTable::new(4, false);
            let group = board.group(&[3, 0, 2], "");
            let holds = |member| Holds::of(if member == culprit { 8 } else { 7 });
            let [first, second, last] = order;
            board.post(group, first, holds(first), ()).unwrap();
            let (ticket, complete) = board.post(group, second, holds(second), ()).unwrap();
            assert!(!complete && board.failure().is_none());
            let error = board.post(group, last, holds(last), ()).unwrap_err();
            let told = error.to_string();
            let CommError::Diverged {
                rank,
                other,
                param,
                of: ReplicatedValue::Weight,
                step: 3,
                majority: true,
                ..
            } = error
            else {
                panic!("{error}")
            };
            assert_eq!(
                (rank, other, &*param),
                ([3, 0, 2][culprit], [0, 3, 3][culprit], "a")
            );
            assert!(
                told.contains("all_reduce #0 `x` on ranks [3, 0, 2]"),
                "{told}"
            );
            assert!(
                matches!(board.poll(ticket), Poll::Failed),
                "it is never complete"
            );
        }
    }
    let mut board = MatchTable::new(2, false);
    let group = board.group(&[0, 1], "");
    board.post(group, 0, Holds::of(7), ()).unwrap();
    let (_, complete) = board.post(group, 1, Holds::of(7), ()).unwrap();
    assert!(complete);
}

/// In any order of ranks: the first in group order represents the others.
#[test]
fn one_that_differs_is_held_against_the_first_in_group_order() {
    for order in [[1, 2, 3], [3, 2, 1], [2, 3, 1]] {
        let (mut board, group) = board(4);
        for member in order {
            board.post(group, member, Name("x"), 0).unwrap();
        }
        let error = board.post(group, 0, Name("y"), 0).unwrap_err();
        assert!(
            matches!(
                error,
                CommError::Mismatch {
                    rank: 0,
                    other: 1,
                    ..
                }
            ),
            "{error}"
        );
    }
}
