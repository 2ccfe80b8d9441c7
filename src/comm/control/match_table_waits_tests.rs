//! Tests of [`MatchTable`], by its invariant about waits that cannot end.

use super::tests::{Name, Plain, board, failure};
use super::*;

#[test]
fn invariant_5_a_missing_rank_that_has_returned_is_named() {
    let (mut board, group) = board(3);
    let (ticket, _) = board.post(group, 0, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    board.returned(2);
    board.check_returned(Wait::All(ticket));
    let error = failure(&board);
    assert!(
        matches!(&error, CommError::RankReturned { rank: 2, during } if during.seq == 0),
        "{error}"
    );
    assert_eq!(board.activity(2), "finished");
}

#[test]
fn a_rank_that_has_joined_may_return() {
    let (mut board, group) = board(2);
    board.post(group, 1, Name("x"), 0).unwrap();
    board.returned(1);
    let (ticket, complete) = board.post(group, 0, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    assert!(complete && board.failure().is_none());
}

/// Ranks 0 and 1 wait for each other in two groups; rank 1 was last.
fn crossed(multithreaded: bool) -> Plain {
    let mut board = Plain::new(3, multithreaded);
    let (group, pair) = (board.group(&[0, 1, 2], ""), board.group(&[0, 1], ""));
    let (ticket, _) = board.post(group, 0, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    let (ticket, _) = board.post(pair, 1, Name("y"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    board
}

#[test]
fn invariant_5_ranks_that_wait_for_each_other_are_told() {
    let error = failure(&crossed(false));
    assert_eq!(
        error.to_string(),
        "deadlock: rank 1 waits in barrier #0 `y` on ranks [0, 1] for rank 0, \
         rank 0 waits in barrier #0 `x` on ranks [0, 1, 2] for rank 1. Make the calls in the same \
         order on all ranks, or, if another thread of a rank would have made the missing call, allow it with \
         `Launch::with_multithreaded_ranks`"
    );
}

#[test]
fn invariant_5_a_rank_that_waits_for_its_own_message_is_told() {
    let (mut board, group) = board(2);
    let receive = board.receive(group, 0, Some(0), 7, Name("x")).unwrap();
    board.begin_wait(Wait::Message(receive));
    let error = failure(&board);
    assert!(
        error
            .to_string()
            .contains("rank 0 waits in barrier #0 `x` on ranks [0, 1] for rank 0"),
        "{error}"
    );
}

#[test]
fn invariant_5_a_multithreaded_rank_that_waits_may_still_come() {
    let mut board = crossed(true);
    assert!(board.failure().is_none());
    let (group, pair) = (board.group(&[0, 1, 2], ""), board.group(&[0, 1], ""));
    assert!(
        board
            .post(pair, 0, Name("y"), 0)
            .is_ok_and(|(_, complete)| complete)
    );
    assert!(board.post(group, 1, Name("x"), 0).is_ok());
}

#[test]
fn invariant_5_a_rank_that_calls_while_it_waits_is_at_fault() {
    for waits in [false, true] {
        let (mut board, group) = board(3);
        let pair = board.group(&[0, 1], "");
        let (first, _) = board.post(group, 0, Name("x"), 0).unwrap();
        let (second, _) = board.post(pair, 0, Name("y"), 0).unwrap();
        board.begin_wait(Wait::All(first));
        if waits {
            board.begin_wait(Wait::All(second));
        } else {
            board.post(pair, 0, Name("z"), 0).unwrap_err();
        }
        let CommError::ConcurrentCalls {
            rank: 0,
            called,
            during,
        } = failure(&board)
        else {
            panic!()
        };
        assert_eq!(
            (&*called.label, &*during.label),
            (if waits { "y" } else { "z" }, "x")
        );
    }
}

#[test]
fn a_wait_that_is_over_is_no_deadlock() {
    let (mut board, group) = board(2);
    let pair = board.group(&[1, 0], "");
    let (first, _) = board.post(group, 0, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(first));
    // Rank 1 completes the collective, and waits in another group before rank 0 has woken up.
    board.post(group, 1, Name("x"), 0).unwrap();
    let (second, _) = board.post(pair, 0, Name("y"), 0).unwrap();
    board.begin_wait(Wait::All(second));
    assert!(board.failure().is_none());
}

/// Most ranks wait in one collective, and one rank, first or last, waits in another group.
#[test]
fn invariant_5_a_cycle_is_found_through_the_one_rank_that_waits_elsewhere() {
    for first in [true, false] {
        let (mut board, group) = board(6);
        let pair = board.group(&[4, 5], "");
        let mut wait = |group, member| {
            let (ticket, _) = board.post(group, member, Name("x"), 0).unwrap();
            board.begin_wait(Wait::All(ticket));
        };
        if first {
            wait(pair, 1);
        }
        (0..5).for_each(|member| wait(group, member));
        if !first {
            wait(pair, 1);
        }
        let CommError::Deadlock { waits } = failure(&board) else {
            panic!("{}", failure(&board))
        };
        let ranks: Vec<_> = waits.iter().map(|(rank, _, next)| (*rank, *next)).collect();
        assert_eq!(
            ranks,
            if first {
                [(4, 5), (5, 4)]
            } else {
                [(5, 4), (4, 5)]
            }
        );
    }
}

/// In a program of one group, no search runs, even while ranks of the previous collective wake up.
#[test]
fn ranks_that_wait_in_one_collective_search_for_nothing() {
    let (mut board, group) = board(4);
    let join = |board: &mut Plain, member| board.post(group, member, Name("x"), 0).unwrap().0;
    let mut before: Option<Vec<OpHandle>> = None;
    for _ in 0..3 {
        let mut tickets = Vec::new();
        for member in 0..4 {
            // Each rank leaves the previous collective only when it posts this one.
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
    before
        .into_iter()
        .flatten()
        .for_each(|ticket| board.end_wait(ticket.member, Wait::All(ticket)));
    let (elsewhere, _) = board.post(pair, 0, Name("y"), 0).unwrap();
    board.begin_wait(Wait::All(elsewhere));
    let ticket = join(&mut board, 0);
    board.begin_wait(Wait::All(ticket));
    assert!(
        board.others_wait_elsewhere(Wait::All(ticket))
            && board.others_wait_elsewhere(Wait::All(elsewhere))
    );
    assert!(board.failure().is_none());
}

/// Runs random programs. Whenever a rank begins to wait, a deadlock must be reported exactly if the
/// rank can be reached from itself, by steps from a waiting rank to the ranks that have not posted.
#[test]
fn invariant_5_a_deadlock_is_told_just_when_waits_form_a_cycle() {
    const RANKS: usize = 6;
    let groups: [&[usize]; 6] = [
        &[0, 1, 2, 3, 4, 5],
        &[0, 1],
        &[2, 3, 4],
        &[5, 1, 3],
        &[4, 0],
        &[2, 5],
    ];
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let mut cycles = 0;
    let mut longest = 0;
    for _ in 0..5000 {
        let mut board = Plain::new(RANKS, false);
        let keys = groups.map(|ranks| board.group(ranks, ""));
        // Ranks that have posted each collective of each group, and the call in which each rank
        // waits.
        let mut joined: [Vec<Vec<usize>>; 6] = Default::default();
        let mut waits: [Option<(usize, usize, OpHandle)>; RANKS] = [None; RANKS];
        for _ in 0..60 {
            let complete = |joined: &[Vec<Vec<usize>>; 6], g: usize, n: usize| {
                joined[g][n].len() == groups[g].len()
            };
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
            let Some(member) = groups[g].iter().position(|member| *member == rank) else {
                continue;
            };
            let (ticket, _) = board.post(keys[g], member, Name("x"), 0).unwrap();
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
                let Some((g, n, _)) = waits[rank] else {
                    return Vec::new();
                };
                groups[g]
                    .iter()
                    .copied()
                    .filter(|rank| !joined[g][n].contains(rank))
                    .collect()
            };
            let mut reached = needed(rank);
            let mut at = 0;
            while at < reached.len() {
                let next = needed(reached[at]);
                reached.extend(
                    next.into_iter()
                        .filter(|next| !reached.contains(next))
                        .collect::<Vec<_>>(),
                );
                at += 1;
            }
            assert_eq!(
                board.failure().is_some(),
                reached.contains(&rank),
                "rank {rank} of {waits:?}"
            );
            if board.failure().is_some() {
                let CommError::Deadlock { waits: told } = failure(&board) else {
                    panic!()
                };
                let nexts = told.iter().skip(1).chain(&told[..1]);
                assert!(
                    told[0].0 == rank && told.iter().zip(nexts).all(|(one, next)| one.2 == next.0),
                    "{told:?}"
                );
                assert!(
                    told.iter()
                        .all(|(rank, _, next)| needed(*rank).contains(next)),
                    "{told:?}"
                );
                (cycles, longest) = (cycles + 1, longest.max(told.len()));
                break;
            }
        }
    }
    assert!(
        cycles > 500 && longest > 3,
        "{cycles} cycles, the longest of {longest} ranks"
    );
}

#[test]
fn invariant_5_a_rank_that_returned_before_the_group_was_made_is_named() {
    let mut board = Plain::new(3, false);
    board.returned(2);
    let group = board.group(&[0, 1, 2], "");
    let (ticket, _) = board.post(group, 0, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    assert!(matches!(
        failure(&board),
        CommError::RankReturned { rank: 2, .. }
    ));
}
