//! Tests of [`P2pQueue`], by its invariants.

use std::sync::Weak;

use super::super::tests::{Name, Plain, board};
use super::super::{CommError, Wait};
use super::*;

fn send(board: &mut Plain, group: GroupKey, from: usize, to: usize, tag: u32, part: usize) -> bool {
    board
        .send(
            group,
            to,
            P2pMessage {
                from,
                tag,
                signature: Name("x"),
                part: Some(part),
            },
        )
        .unwrap()
        .1
}

fn receive(
    board: &mut Plain,
    group: GroupKey,
    member: usize,
    from: Option<usize>,
    tag: u32,
) -> RecvHandle {
    board.receive(group, member, from, tag, Name("x")).unwrap()
}

/// Returns the sender and the data of a message, if it has arrived.
fn arrived(board: &mut Plain, receive_handle: RecvHandle) -> Option<(usize, usize)> {
    match board.poll_message(receive_handle) {
        Poll::Ready(message) => Some((message.from, message.part)),
        _ => None,
    }
}

#[test]
fn messages_of_one_sender_and_tag_are_in_order_whatever_is_between() {
    let (mut board, group) = board(3);
    for (from, tag, part) in [(1, 0, 10), (2, 0, 20), (1, 1, 11), (1, 0, 12)] {
        assert!(!send(&mut board, group, from, 0, tag, part));
    }
    let receives = [(Some(1), 1), (Some(1), 0), (None, 0), (Some(1), 0)]
        .map(|(from, tag)| receive(&mut board, group, 0, from, tag));
    let got = receives.map(|receive_handle| arrived(&mut board, receive_handle));
    assert_eq!(
        got,
        [Some((1, 11)), Some((1, 10)), Some((2, 20)), Some((1, 12))]
    );
}

#[test]
fn receives_take_messages_in_the_order_in_which_they_were_posted() {
    let (mut board, group) = board(3);
    let receives = [None, Some(2), None].map(|from| receive(&mut board, group, 0, from, 0));
    assert!(
        receives
            .iter()
            .all(|receive_handle| !board.is_over(Wait::Message(*receive_handle)))
    );
    assert!(!send(&mut board, group, 1, 0, 9, 0), "the tag differs");
    assert!(
        [(2, 20), (2, 21), (1, 10)]
            .iter()
            .all(|(from, part)| send(&mut board, group, *from, 0, 0, *part))
    );
    let [first, second, third] = receives;
    assert!(board.is_over(Wait::Message(third)));
    assert_eq!(arrived(&mut board, third), Some((1, 10)));
    assert_eq!(arrived(&mut board, first), Some((2, 20)));
    assert_eq!(arrived(&mut board, second), Some((2, 21)));
}

/// If its process is lost then, a rank would wait for ever.
#[test]
fn who_has_sent_a_message_owes_its_data_to_who_may_receive_it() {
    let (mut board, group) = board(3);
    let announce = |board: &mut Plain, tag| {
        board
            .send(
                group,
                0,
                P2pMessage {
                    from: 1,
                    tag,
                    signature: Name("x"),
                    part: None,
                },
            )
            .unwrap()
            .0
    };
    let owing = |board: &Plain| [0, 1, 2].map(|rank| board.owes(rank));
    let message = announce(&mut board, 0);
    assert_eq!(owing(&board), [false, true, false], "it may be received");
    let handle = receive(&mut board, group, 0, Some(1), 0);
    assert_eq!(owing(&board), [false, true, false]);
    board.provide_message(message, 7);
    assert_eq!(
        (owing(&board), arrived(&mut board, handle)),
        ([false; 3], Some((1, 7)))
    );
    announce(&mut board, 1);
    let handle = receive(&mut board, group, 0, Some(1), 1);
    board.release_receive(handle);
    assert_eq!(owing(&board), [false; 3], "no rank receives it");
}

#[test]
fn a_receive_that_was_given_up_takes_its_message_which_is_freed() {
    let mut board = MatchTable::<Name, Arc<()>>::new(2, false);
    let group = board.group(&[0, 1], "");
    let send = |board: &mut MatchTable<Name, Arc<()>>| {
        let part = Arc::new(());
        let held = Arc::downgrade(&part);
        board
            .send(
                group,
                0,
                P2pMessage {
                    from: 1,
                    tag: 0,
                    signature: Name("x"),
                    part: Some(part),
                },
            )
            .unwrap();
        held
    };
    let receives = [0; 3].map(|_| board.receive(group, 0, None, 0, Name("x")).unwrap());
    board.release_receive(receives[0]);
    let alive = |held: &Weak<()>| held.upgrade().is_some();
    let first = send(&mut board);
    drop(board.take_freed());
    assert!(!alive(&first), "its receive was released");
    let second = send(&mut board);
    board.release_receive(receives[1]);
    drop(board.take_freed());
    assert!(!alive(&second), "released after it had arrived");
    let third = send(&mut board);
    assert!(matches!(board.poll_message(receives[2]), Poll::Ready(_)));
    assert!(!alive(&third), "taken");
    let fourth = send(&mut board);
    board.fail(Failure::Panicked {
        rank: 1,
        message: "boom".into(),
    });
    drop(board.take_freed());
    assert!(!alive(&fourth), "no receive will take it");
}

#[test]
fn what_a_receive_does_not_expect_fails_the_world() {
    for sent_first in [true, false] {
        let (mut board, group) = board(3);
        let send = |board: &mut Plain| {
            board.send(
                group,
                2,
                P2pMessage {
                    from: 1,
                    tag: 0,
                    signature: Name("y"),
                    part: Some(0),
                },
            )
        };
        let post = |board: &mut Plain| board.receive(group, 2, Some(1), 0, Name("x"));
        let error = if sent_first {
            send(&mut board).unwrap();
            post(&mut board).unwrap_err()
        } else {
            let receive_handle = post(&mut board).unwrap();
            let error = send(&mut board).unwrap_err();
            assert!(matches!(board.poll_message(receive_handle), Poll::Failed));
            error
        };
        let CommError::Mismatch {
            rank: 2,
            other: 1,
            during,
            differs,
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!((during.seq, differs), (0, "label `x` vs `y`".into()));
        assert!(board.failure().is_some());
    }
}

#[test]
fn who_waits_for_a_rank_that_has_left_is_told() {
    let left = |from: Option<usize>, who: &[usize]| {
        let (mut board, group) = board(3);
        let receive_handle = receive(&mut board, group, 0, from, 0);
        assert!(who.iter().all(|rank| board.returned(*rank)));
        board.begin_wait(Wait::Message(receive_handle));
        match board.failure() {
            Some(Failure::Collective(CommError::RankReturned { rank, .. })) => Some(*rank),
            _ => None,
        }
    };
    assert_eq!(left(Some(1), &[2]), None);
    assert_eq!(left(Some(1), &[1]), Some(1));
    assert_eq!(left(None, &[1]), None, "the other may still send");
    assert_eq!(left(None, &[1, 2]), Some(1));
}

#[test]
fn a_cycle_of_waits_may_go_through_a_receive() {
    let (mut board, group) = board(3);
    let (ticket, _) = board.post(group, 1, Name("x"), 0).unwrap();
    board.begin_wait(Wait::All(ticket));
    let any_rank = receive(&mut board, group, 2, None, 0);
    board.begin_wait(Wait::Message(any_rank));
    assert!(
        board.failure().is_none(),
        "rank 0 may send to rank 2, and may post"
    );
    let receive_handle = receive(&mut board, group, 0, Some(1), 0);
    board.begin_wait(Wait::Message(receive_handle));
    let Some(Failure::Collective(CommError::Deadlock { waits })) = board.failure() else {
        panic!("no deadlock")
    };
    let who: Vec<_> = waits
        .iter()
        .map(|(rank, _, target)| (*rank, *target))
        .collect();
    assert_eq!(who, [(0, 1), (1, 0)]);
}
