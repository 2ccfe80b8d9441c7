//! Tests of [`Board`], by its invariants.

use std::sync::Weak;

use crate::comm::{Digests, Replicated};

use super::*;

/// An operation and a label; two labels differ.
#[derive(Debug, Clone)]
pub(super) struct Name(pub &'static str);

impl Fingerprint for Name {
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

pub(super) type Plain = Board<Name, usize>;

pub(super) fn board(ranks: usize) -> (Plain, GroupKey) {
    let mut board = Plain::new(ranks, false);
    let all: Vec<_> = (0..ranks).collect();
    let group = board.group(&all, "");
    (board, group)
}

fn ready(board: &mut Plain, ticket: Ticket) -> Option<Vec<usize>> {
    match board.poll(ticket) {
        Poll::Ready(parts) => Some(parts.to_vec()),
        _ => None,
    }
}

fn failure(board: &Plain) -> CommError {
    board.failure().expect("it has failed").error(None)
}

#[test]
fn invariants_1_and_2_nth_calls_meet_and_complete_with_the_last() {
    let (mut board, group) = board(3);
    let mut tickets = [Vec::new(), Vec::new(), Vec::new()];
    // Rank 0 runs three calls ahead.
    for member in [0, 0, 0, 1, 2, 2, 1, 1, 2] {
        let nth = tickets[member].len();
        let (ticket, complete) = board.join(group, member, Name("x"), 10 * nth + member).unwrap();
        tickets[member].push(ticket);
        let joined = tickets.iter().filter(|tickets| tickets.len() > nth).count();
        assert_eq!(complete, joined == 3);
    }
    for nth in 0..3 {
        for tickets in &tickets {
            assert_eq!(ready(&mut board, tickets[nth]), Some(vec![10 * nth, 10 * nth + 1, 10 * nth + 2]));
        }
    }
}

#[test]
fn the_last_to_join_is_named_by_its_global_rank() {
    let mut board = Plain::new(4, false);
    let group = board.group(&[3, 0, 2], "");
    let mut tickets = Vec::new();
    // Member 1 runs ahead: the first call ends with member 2, the second with member 0.
    for member in [1, 1, 0, 2, 2, 0] {
        tickets.push(board.join(group, member, Name("x"), 0).unwrap().0);
    }
    let last = |ticket: &Ticket| board.last(*ticket);
    assert_eq!(tickets.iter().map(last).collect::<Vec<_>>(), [2, 3, 2, 2, 3, 3]);
}

/// Deposits that are nothing but alive, and a look at whether they still are.
struct Watched(Board<Name, Arc<()>>, GroupKey, Vec<Vec<Weak<()>>>);

impl Watched {
    fn new() -> Self {
        let mut board = Board::new(2, false);
        let group = board.group(&[0, 1], "");
        Self(board, group, Vec::new())
    }

    /// The next collective, joined by its first `joined` ranks.
    fn join(&mut self, joined: usize) -> Vec<Ticket> {
        let parts: Vec<_> = (0..joined).map(|_| Arc::new(())).collect();
        self.2.push(parts.iter().map(Arc::downgrade).collect());
        let join = |(member, part)| self.0.join(self.1, member, Name("x"), part).unwrap().0;
        parts.into_iter().enumerate().map(join).collect()
    }

    /// For each collective whether its deposits are alive, once the freed ones have been dropped.
    fn alive(&mut self) -> Vec<bool> {
        drop(self.0.take_freed());
        self.2.iter().map(|parts| parts.iter().any(|part| part.upgrade().is_some())).collect()
    }
}

#[test]
fn invariant_3_deposits_go_when_all_have_taken_theirs() {
    let mut watched = Watched::new();
    let tickets: Vec<_> = (0..3).flat_map(|_| watched.join(2)).collect();
    // The collectives in the middle and at the end are released first, and wait for nobody.
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
    assert!(watched.0.groups[0].slots.is_empty());
    // One that is never released keeps nothing of those after it.
    watched.join(2);
    let later = watched.join(2);
    later.into_iter().for_each(|ticket| watched.0.release(ticket));
    let kept = |slot: &Slot<_, _>| slot.joined.iter().flatten().count();
    assert_eq!(watched.0.groups[0].slots.iter().map(kept).collect::<Vec<_>>(), [2, 0]);
    assert_eq!(watched.join(1)[0].seq, 5);
}

#[test]
fn invariant_3_a_failure_frees_what_it_leaves_incomplete() {
    let mut watched = Watched::new();
    let (complete, incomplete) = (watched.join(2), watched.join(1));
    assert_eq!(watched.alive(), [true, true]);
    watched.0.fail(Failure::Panicked { rank: 1, message: String::new() });
    assert_eq!(watched.alive(), [true, false]);
    assert!(matches!(watched.0.poll(complete[0]), Poll::Ready(_)));
    assert!(matches!(watched.0.poll(incomplete[0]), Poll::Failed));
    [complete[0], complete[1], incomplete[0]].into_iter().for_each(|ticket| watched.0.release(ticket));
    assert_eq!(watched.alive(), [false, false]);
}

/// Also where the last one to come is the one that differs: nobody is absent then.
#[test]
fn invariant_3_a_mismatch_frees_what_it_is_about() {
    let mut watched = Watched::new();
    watched.join(1);
    let (part, group) = (Arc::new(()), watched.1);
    watched.2.push(vec![Arc::downgrade(&part)]);
    watched.0.join(group, 1, Name("y"), part).unwrap_err();
    assert_eq!(watched.alive(), [false, false]);
    let late = Arc::new(());
    watched.2.push(vec![Arc::downgrade(&late)]);
    watched.0.join(group, 0, Name("x"), late).unwrap_err();
    assert_eq!(watched.2[2][0].strong_count(), 1, "it is dropped outside the lock");
    assert_eq!(watched.alive(), [false; 3]);
}

#[test]
fn invariant_4_the_first_failure_is_final_and_joint() {
    let (mut board, group) = board(3);
    let pair = board.group(&[0, 2], "");
    board.fail(Failure::Panicked { rank: 1, message: "first".into() });
    board.fail(Failure::Panicked { rank: 2, message: "second".into() });
    for group in [group, pair] {
        let error = board.join(group, 0, Name("x"), 0).unwrap_err();
        assert!(
            matches!(error, CommError::RankPanicked { rank: 1, ref message, during: Some(_) } if message == "first")
        );
    }
}

#[test]
fn a_complete_collective_is_ready_even_after_a_failure() {
    let (mut board, group) = board(2);
    let (ticket, _) = board.join(group, 0, Name("x"), 5).unwrap();
    board.join(group, 1, Name("x"), 6).unwrap();
    board.fail(Failure::Panicked { rank: 1, message: String::new() });
    assert_eq!(ready(&mut board, ticket), Some(vec![5, 6]));
}

#[test]
fn of_three_ranks_the_one_outside_the_majority_is_named() {
    let (mut board, group) = board(4);
    board.join(group, 3, Name("x"), 0).unwrap();
    board.join(group, 0, Name("x"), 0).unwrap();
    let error = board.join(group, 2, Name("y"), 0).unwrap_err();
    let CommError::Mismatch { rank, other, differs, .. } = &error else { panic!("{error}") };
    assert_eq!((*rank, *other, differs.as_str()), (2, 0, "label `y` vs `x`"));
    assert_eq!(board.join(group, 1, Name("x"), 0).unwrap_err(), error, "who comes later sees the same");
}

#[test]
fn invariant_5_a_missing_rank_that_has_returned_is_named() {
    let (mut board, group) = board(3);
    let (ticket, _) = board.join(group, 0, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    board.returned(2);
    board.check_left(Wait::All(ticket));
    let error = failure(&board);
    assert!(matches!(&error, CommError::RankLeft { rank: 2, during } if during.seq == 0), "{error}");
    assert_eq!(board.doing(2), "finished");
}

#[test]
fn a_rank_that_has_joined_may_return() {
    let (mut board, group) = board(2);
    board.join(group, 1, Name("x"), 0).unwrap();
    board.returned(1);
    let (ticket, complete) = board.join(group, 0, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    assert!(complete && board.failure().is_none());
}

/// Ranks 0 and 1 wait for each other in two groups; rank 1 came last.
fn crossed(multithreaded: bool) -> Plain {
    let mut board = Plain::new(3, multithreaded);
    let (group, pair) = (board.group(&[0, 1, 2], ""), board.group(&[0, 1], ""));
    let (ticket, _) = board.join(group, 0, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    let (ticket, _) = board.join(pair, 1, Name("y"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    board
}

#[test]
fn invariant_5_ranks_that_wait_for_each_other_are_told() {
    let error = failure(&crossed(false));
    assert_eq!(
        error.to_string(),
        "deadlock: rank 1 waits in barrier #0 `y` on ranks [0, 1] for rank 0, \
         rank 0 waits in barrier #0 `x` on ranks [0, 1, 2] for rank 1; make the calls in one order on \
         all ranks, or, if another thread of one of them would have come, declare it: `Launch::multithreaded`"
    );
}

#[test]
fn invariant_5_a_multithreaded_rank_that_waits_may_still_come() {
    let mut board = crossed(true);
    assert!(board.failure().is_none());
    let (group, pair) = (board.group(&[0, 1, 2], ""), board.group(&[0, 1], ""));
    assert!(board.join(pair, 0, Name("y"), 0).is_ok_and(|(_, complete)| complete));
    assert!(board.join(group, 1, Name("x"), 0).is_ok());
}

#[test]
fn invariant_5_a_rank_that_calls_while_it_waits_is_at_fault() {
    for waits in [false, true] {
        let (mut board, group) = board(3);
        let pair = board.group(&[0, 1], "");
        let (first, _) = board.join(group, 0, Name("x"), 0).unwrap();
        let (second, _) = board.join(pair, 0, Name("y"), 0).unwrap();
        board.begin_wait(Wait::All(first));
        if waits {
            board.begin_wait(Wait::All(second));
        } else {
            board.join(pair, 0, Name("z"), 0).unwrap_err();
        }
        let CommError::ConcurrentCalls { rank: 0, called, during } = failure(&board) else { panic!() };
        assert_eq!((&*called.label, &*during.label), (if waits { "y" } else { "z" }, "x"));
    }
}

#[test]
fn groups_are_told_apart_by_ranks_order_and_name() {
    let (mut board, group) = board(3);
    let others = [board.group(&[2, 1, 0], ""), board.group(&[0, 1], ""), board.group(&[0, 1, 2], "copy")];
    assert_eq!([board.group(&[0, 1, 2], ""), board.group(&[0, 1, 2], "copy")], [group, others[2]]);
    assert!(others.iter().all(|other| *other != group) && others[0] != others[1] && others[1] != others[2]);
}

#[test]
fn a_wait_that_is_over_is_no_deadlock() {
    let (mut board, group) = board(2);
    let pair = board.group(&[1, 0], "");
    let (first, _) = board.join(group, 0, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(first));
    // Rank 1 completes it, and waits elsewhere before rank 0 has woken up.
    board.join(group, 1, Name("x"), 0).unwrap();
    let (second, _) = board.join(pair, 0, Name("y"), 0).unwrap();
    board.begin_wait(Wait::All(second));
    assert!(board.failure().is_none());
}

#[test]
fn doing_is_what_it_was_at_the_failure() {
    let (mut board, group) = board(3);
    assert_eq!(board.doing(0), "computing, before any collective");
    let (ticket, _) = board.join(group, 0, Name("x"), 0).unwrap();
    assert_eq!(board.doing(0), "computing since barrier #0 `x` on ranks [0, 1, 2]");
    board.begin_wait(Wait::All(ticket));
    board.fail(Failure::Panicked { rank: 1, message: String::new() });
    board.end_wait(0, Wait::All(ticket));
    board.returned(0);
    assert_eq!(board.doing(0), "waiting in barrier #0 `x` on ranks [0, 1, 2] for ranks [1, 2]");
}

/// What a rank expects of each of the others, by its place: two agree if both expect the same of each other.
struct Expects(usize, [u8; 3]);

impl Fingerprint for Expects {
    fn op(&self) -> Op {
        Op::AllToAllList
    }

    fn label(&self) -> Arc<str> {
        "".into()
    }

    fn difference(&self, other: &Self) -> Option<String> {
        let (a, b) = (self.1[other.0], other.1[self.0]);
        (a != b).then(|| format!("{a} vs {b}"))
    }

    fn is_of_pairs(&self) -> bool {
        true
    }
}

#[test]
fn invariant_2_agreements_of_pairs_are_checked_with_all_who_are_there() {
    let mut board = Board::new(3, false);
    let group = board.group(&[0, 1, 2], "");
    board.join(group, 0, Expects(0, [0, 1, 2]), 0).unwrap();
    board.join(group, 1, Expects(1, [1, 0, 3]), 0).unwrap();
    // It agrees with the first that is there, and not with the second.
    let error = board.join(group, 2, Expects(2, [2, 4, 0]), 0).unwrap_err();
    let CommError::Mismatch { rank: 2, other: 1, differs, .. } = &error else { panic!("{error}") };
    assert_eq!(differs, "4 vs 3");
}

/// What a rank holds.
pub(super) struct Holds(Vec<Digests>);

impl Holds {
    pub fn of(value: u64) -> Self {
        let (names, values) = (["a".into()].into(), [Some(value)].into());
        Self(vec![Digests { of: Replicated::Weight, step: 3, names, values }])
    }
}

impl Fingerprint for Holds {
    fn op(&self) -> Op {
        Op::AllReduce
    }

    fn label(&self) -> Arc<str> {
        "x".into()
    }

    fn difference(&self, _: &Self) -> Option<String> {
        None
    }

    fn divergence<'a>(prints: impl Iterator<Item = &'a Self> + Clone) -> Option<Divergence> {
        Divergence::among(prints.map(|print| &print.0[..]))
    }
}

/// Whoever comes first and last: only then is it known who is at fault.
#[test]
fn invariant_2_what_all_hold_alike_is_compared_when_the_last_has_joined() {
    for order in [[0, 1, 2], [1, 2, 0], [2, 0, 1]] {
        for culprit in 0..3 {
            let mut board = Board::new(4, false);
            let group = board.group(&[3, 0, 2], "");
            let holds = |member| Holds::of(if member == culprit { 8 } else { 7 });
            let [first, second, last] = order;
            board.join(group, first, holds(first), ()).unwrap();
            let (ticket, complete) = board.join(group, second, holds(second), ()).unwrap();
            assert!(!complete && board.failure().is_none());
            let error = board.join(group, last, holds(last), ()).unwrap_err();
            let told = error.to_string();
            let CommError::Diverged { rank, other, param, of: Replicated::Weight, step: 3, majority: true, .. } = error
            else {
                panic!("{error}")
            };
            assert_eq!((rank, other, &*param), ([3, 0, 2][culprit], [0, 3, 3][culprit], "a"));
            assert!(told.contains("all_reduce #0 `x` on ranks [3, 0, 2]"), "{told}");
            assert!(matches!(board.poll(ticket), Poll::Failed), "it is never complete");
        }
    }
    let mut board = Board::new(2, false);
    let group = board.group(&[0, 1], "");
    board.join(group, 0, Holds::of(7), ()).unwrap();
    let (_, complete) = board.join(group, 1, Holds::of(7), ()).unwrap();
    assert!(complete);
}

/// Most ranks wait in one collective, and one elsewhere, whether it comes first or last.
#[test]
fn invariant_5_a_cycle_is_found_through_the_one_rank_that_waits_elsewhere() {
    for first in [true, false] {
        let (mut board, group) = board(6);
        let pair = board.group(&[4, 5], "");
        let mut wait = |group, member| {
            let (ticket, _) = board.join(group, member, Name("x"), 0).unwrap();
            board.begin_wait(Wait::All(ticket));
        };
        if first {
            wait(pair, 1);
        }
        (0..5).for_each(|member| wait(group, member));
        if !first {
            wait(pair, 1);
        }
        let CommError::Deadlock { waits } = failure(&board) else { panic!("{}", failure(&board)) };
        let ranks: Vec<_> = waits.iter().map(|(rank, _, next)| (*rank, *next)).collect();
        assert_eq!(ranks, if first { [(4, 5), (5, 4)] } else { [(5, 4), (4, 5)] });
    }
}

/// In a program of one group nobody looks at all the ranks, even while those of the collective before wake up.
#[test]
fn ranks_that_wait_in_one_collective_search_for_nothing() {
    let (mut board, group) = board(4);
    let join = |board: &mut Plain, member| board.join(group, member, Name("x"), 0).unwrap().0;
    let mut before: Option<Vec<Ticket>> = None;
    for _ in 0..3 {
        let mut tickets = Vec::new();
        for member in 0..4 {
            // Each leaves the collective before only as it comes to this one.
            if let Some(before) = &before {
                board.end_wait(member, Wait::All(before[member]));
            }
            let ticket = join(&mut board, member);
            board.begin_wait(Wait::All(ticket));
            assert!(!board.others_wait_elsewhere(Wait::All(ticket)));
            tickets.push(ticket);
        }
        before = Some(tickets);
    }
    let pair = board.group(&[2, 3], "");
    before.into_iter().flatten().for_each(|ticket| board.end_wait(ticket.member, Wait::All(ticket)));
    let (elsewhere, _) = board.join(pair, 0, Name("y"), 0).unwrap();
    board.begin_wait(Wait::All(elsewhere));
    let ticket = join(&mut board, 0);
    board.begin_wait(Wait::All(ticket));
    assert!(board.others_wait_elsewhere(Wait::All(ticket)) && board.others_wait_elsewhere(Wait::All(elsewhere)));
    assert!(board.failure().is_none());
}

/// Random programs: whenever a rank begins to wait, a deadlock is told just if the rank can be reached from itself,
/// step by step from whoever waits to those that have not come.
#[test]
fn invariant_5_a_deadlock_is_told_just_when_waits_lead_in_a_circle() {
    const RANKS: usize = 6;
    let groups: [&[usize]; 6] = [&[0, 1, 2, 3, 4, 5], &[0, 1], &[2, 3, 4], &[5, 1, 3], &[4, 0], &[2, 5]];
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let (mut circles, mut longest) = (0, 0);
    for _ in 0..5000 {
        let mut board = Plain::new(RANKS, false);
        let keys = groups.map(|ranks| board.group(ranks, ""));
        // Who has joined each collective of each group, and where each rank waits.
        let mut joined: [Vec<Vec<usize>>; 6] = Default::default();
        let mut waits: [Option<(usize, usize, Ticket)>; RANKS] = [None; RANKS];
        for _ in 0..60 {
            let complete = |joined: &[Vec<Vec<usize>>; 6], g: usize, n: usize| joined[g][n].len() == groups[g].len();
            let rank = random(RANKS);
            if let Some((g, n, ticket)) = waits[rank] {
                if complete(&joined, g, n) {
                    board.end_wait(board.rank(Wait::All(ticket)), Wait::All(ticket));
                    board.release(ticket);
                    waits[rank] = None;
                }
                continue;
            }
            let g = random(groups.len());
            let Some(member) = groups[g].iter().position(|member| *member == rank) else { continue };
            let (ticket, _) = board.join(keys[g], member, Name("x"), 0).unwrap();
            let n = ticket.seq as usize;
            joined[g].resize(joined[g].len().max(n + 1), Vec::new());
            joined[g][n].push(rank);
            if complete(&joined, g, n) || random(3) == 0 {
                board.release(ticket);
                continue;
            }
            waits[rank] = Some((g, n, ticket));
            board.begin_wait(Wait::All(ticket));
            let needed = |rank: usize| -> Vec<usize> {
                let Some((g, n, _)) = waits[rank] else { return Vec::new() };
                groups[g].iter().copied().filter(|rank| !joined[g][n].contains(rank)).collect()
            };
            let mut reached = needed(rank);
            let mut at = 0;
            while at < reached.len() {
                let next = needed(reached[at]);
                reached.extend(next.into_iter().filter(|next| !reached.contains(next)).collect::<Vec<_>>());
                at += 1;
            }
            assert_eq!(board.failure().is_some(), reached.contains(&rank), "rank {rank} of {waits:?}");
            if board.failure().is_some() {
                let CommError::Deadlock { waits: told } = failure(&board) else { panic!() };
                let nexts = told.iter().skip(1).chain(&told[..1]);
                assert!(told[0].0 == rank && told.iter().zip(nexts).all(|(one, next)| one.2 == next.0), "{told:?}");
                assert!(told.iter().all(|(rank, _, next)| needed(*rank).contains(next)), "{told:?}");
                (circles, longest) = (circles + 1, longest.max(told.len()));
                break;
            }
        }
    }
    assert!(circles > 500 && longest > 3, "{circles} circles, the longest of {longest} ranks");
}

#[test]
fn invariant_5_a_rank_that_returned_before_the_group_was_made_is_named() {
    let mut board = Plain::new(3, false);
    board.returned(2);
    let group = board.group(&[0, 1, 2], "");
    let (ticket, _) = board.join(group, 0, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    assert!(matches!(failure(&board), CommError::RankLeft { rank: 2, .. }));
}

/// Whichever came first: the one of the lowest place stands for all.
#[test]
fn one_that_differs_is_held_against_the_first_in_group_order() {
    for order in [[1, 2, 3], [3, 2, 1], [2, 3, 1]] {
        let (mut board, group) = board(4);
        for member in order {
            board.join(group, member, Name("x"), 0).unwrap();
        }
        let error = board.join(group, 0, Name("y"), 0).unwrap_err();
        assert!(matches!(error, CommError::Mismatch { rank: 0, other: 1, .. }), "{error}");
    }
}
