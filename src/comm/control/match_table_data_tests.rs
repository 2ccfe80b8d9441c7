//! Tests of [`MatchTable`] with ranks of other processes, by its invariants.

use std::sync::Weak;

use super::tests::{Holds, Name, Plain, board};
use super::*;

/// Posts a call of a rank of another process, whose contribution arrives later.
fn announce<F: Signature, P>(
    board: &mut MatchTable<F, P>,
    group: GroupKey,
    member: usize,
    signature: F,
) -> Result<OpHandle, CommError> {
    board
        .post(group, member, signature, CallData::Remote(DataMode::Eager))
        .map(|(handle, _)| handle)
}

/// Posts a call of a rank of another process, whose contribution is sent on demand.
fn offer<F: Signature, P>(
    board: &mut MatchTable<F, P>,
    group: GroupKey,
    member: usize,
    signature: F,
) -> Result<(OpHandle, bool), CommError> {
    board.post(
        group,
        member,
        signature,
        CallData::Remote(DataMode::OnDemand),
    )
}

fn ready(board: &mut Plain, ticket: OpHandle) -> Option<Vec<usize>> {
    match board.poll(ticket) {
        Poll::Ready(parts) => Some(parts.to_vec()),
        _ => None,
    }
}

fn panicked(rank: usize) -> Failure {
    Failure::Panicked {
        rank,
        message: "boom".into(),
    }
}

#[test]
fn invariant_6_nothing_is_complete_without_the_deposits_of_those_elsewhere() {
    let (mut board, group) = board(3);
    // Member 2 posts two calls before the others; its second contribution arrives first.
    let first = announce(&mut board, group, 2, Name("x")).unwrap();
    let second = announce(&mut board, group, 2, Name("x")).unwrap();
    assert_eq!((first.seq, second.seq), (0, 1));
    assert!(!board.provide_data(second, 12));
    let here: Vec<_> = [0, 1, 0, 1]
        .map(|member| board.post(group, member, Name("x"), member).unwrap())
        .into();
    let complete: Vec<_> = here.iter().map(|(_, complete)| *complete).collect();
    assert_eq!(complete, [false, false, false, true]);
    assert_eq!(ready(&mut board, here[2].0), Some(vec![0, 1, 12]));
    assert_eq!(board.last(here[2].0), 1);
    assert!(!board.is_over(Wait::All(here[0].0)));
    assert!(
        !board.is_complete(here[0].0),
        "a contribution in flight is not offered"
    );
    assert!(board.provide_data(first, 2));
    assert_eq!(ready(&mut board, here[0].0), Some(vec![0, 1, 2]));
    assert_eq!(board.last(here[0].0), 2, "its contribution arrived last");
    let (over, _) = here[0];
    here.into_iter()
        .for_each(|(ticket, _)| board.release(ticket));
    assert!(
        board.groups[0].entries.is_empty(),
        "remote ranks take no result here"
    );
    assert!(board.signature(over).is_none(), "nothing is kept");
}

/// Also while another process decides whether the mismatch is the first failure.
#[test]
fn a_mismatched_collective_is_not_completed_by_the_contribution_that_follows() {
    let (mut board, group) = board(2);
    board.arbiter.defer();
    let (here, _) = board.post(group, 0, Name("x"), 0).unwrap();
    announce(&mut board, group, 1, Name("y")).unwrap_err();
    assert!(board.failure().is_none());
    assert!(!board.provide_data(OpHandle { member: 1, ..here }, 1));
    assert_eq!(ready(&mut board, here), None);
}

#[test]
fn invariant_6_who_has_called_owes_its_deposit_to_those_who_have_yet_to_take_the_result() {
    let (mut board, group) = board(3);
    let [elsewhere, deferred] =
        [2, 1].map(|member| announce(&mut board, group, member, Name("x")).unwrap());
    let owing = |board: &Plain| [0, 1, 2].map(|rank| board.owes(rank));
    assert_eq!(
        owing(&board),
        [false, true, true],
        "rank 0, which has not posted yet, needs them"
    );
    let (here, _) = board.post(group, 0, Name("x"), 0).unwrap();
    board.provide_data(elsewhere, 2);
    assert_eq!(owing(&board), [false, true, false]);
    board.release(here);
    assert_eq!(owing(&board), [false; 3], "no rank needs it");
    board.provide_data(deferred, 1);
}

/// Tests contributions that are in flight, and one that is offered.
#[test]
fn invariant_7_replicated_values_are_compared_with_remote_ones() {
    for defers in [false, true] {
        let mut board = MatchTable::new(3, false);
        if defers {
            board.arbiter.defer();
        }
        let group = board.group(&[0, 1, 2], "");
        let elsewhere = announce(&mut board, group, 2, Holds::of(8)).unwrap();
        let (here, _) = board.post(group, 0, Holds::of(7), ()).unwrap();
        let Err(CommError::Diverged {
            rank: 2,
            other: 0,
            majority: true,
            ..
        }) = offer(&mut board, group, 1, Holds::of(7))
        else {
            panic!()
        };
        assert_eq!(
            (board.failure().is_none(), board.arbiter.is_undecided()),
            (defers, defers)
        );
        board.provide_data(elsewhere, ());
        assert!(!matches!(board.poll(here), Poll::Ready(_)));
    }
}

/// The rank owes its contribution to the others, which wait for it as for a remote rank. Its
/// reports do not name this internal call.
#[test]
fn invariant_6_a_rank_here_joins_before_its_deposit_is_there() {
    let (mut board, group) = board(2);
    board.post(group, 0, Name("x"), 0).unwrap();
    let parts = board.group(&[0, 1], "parts");
    let late = board
        .post(parts, 0, Name("y"), CallData::Local(None))
        .unwrap()
        .0;
    assert_eq!(&*board.last_call(group, 0).unwrap().label, "x");
    let (other, complete) = board.post(parts, 1, Name("y"), 1).unwrap();
    assert!(!complete && !board.is_complete(other) && ready(&mut board, late).is_none());
    assert!(board.provide_data(late, 7));
    assert_eq!(
        [ready(&mut board, late), ready(&mut board, other)],
        [Some(vec![7, 1]), Some(vec![7, 1])]
    );
}

#[test]
fn who_is_announced_is_not_missed_though_it_returns_and_is_named_once_time_is_up() {
    let (mut board, group) = board(3);
    let (ticket, _) = board.post(group, 0, Name("x"), 0).unwrap();
    let elsewhere = announce(&mut board, group, 2, Name("x")).unwrap();
    assert_eq!(
        board.missing(Wait::All(ticket)),
        [1, 2],
        "the contribution of rank 2 is in flight"
    );
    assert!(board.returned(2));
    board.begin_wait(Wait::All(ticket));
    assert!(board.failure().is_none(), "rank 2 has posted");
    board.provide_data(elsewhere, 2);
    assert_eq!(board.missing(Wait::All(ticket)), [1]);
    assert!(board.returned(1) && !board.returned(1));
    board.check_returned(Wait::All(ticket));
    let CommError::RankReturned { rank, .. } = board.failure().unwrap().error(None) else {
        panic!()
    };
    assert_eq!(rank, 1);
}

/// Ranks 0 and 1 wait for each other. A remote rank that both need is not part of the cycle.
#[test]
fn invariant_5_holds_among_the_ranks_that_are_here() {
    let mut board = Plain::new(3, false);
    let [a, b] = [board.group(&[0, 1, 2], "a"), board.group(&[0, 1, 2], "b")];
    let (of_0, _) = board.post(a, 0, Name("x"), 0).unwrap();
    let (of_1, _) = board.post(b, 1, Name("y"), 1).unwrap();
    board.begin_wait(Wait::All(of_0));
    for group in [a, b] {
        let ticket = announce(
            &mut board,
            group,
            2,
            Name(if group == a { "x" } else { "y" }),
        )
        .unwrap();
        board.provide_data(ticket, 2);
    }
    assert!(board.failure().is_none());
    board.begin_wait(Wait::All(of_1));
    let CommError::Deadlock { waits } = board.failure().unwrap().error(None) else {
        panic!()
    };
    assert_eq!(waits.len(), 2);
}

/// The contribution that completes the collective ends the counted waits.
#[test]
fn a_wait_that_a_late_deposit_ends_is_counted_no_longer() {
    let (mut board, group) = board(2);
    let (ticket, _) = board.post(group, 0, Name("x"), 0).unwrap();
    let elsewhere = announce(&mut board, group, 1, Name("x")).unwrap();
    board.begin_wait(Wait::All(ticket));
    assert_eq!(board.waits, 1);
    assert!(board.provide_data(elsewhere, 1));
    assert_eq!(board.waits, 0);
}

#[test]
fn invariant_2_a_mismatch_is_found_while_the_deposit_is_on_its_way() {
    let (mut board, group) = board(3);
    announce(&mut board, group, 1, Name("x")).unwrap();
    let Err(CommError::Mismatch { rank, other, .. }) = announce(&mut board, group, 2, Name("y"))
    else {
        panic!()
    };
    assert_eq!((rank, other), (2, 1));
}

#[test]
fn invariant_3_a_deposit_that_comes_too_late_is_freed() {
    for failed in [false, true] {
        let mut board = MatchTable::<Name, Arc<()>>::new(2, false);
        let group = board.group(&[0, 1], "");
        let part = |held: &mut Vec<Weak<()>>| {
            let part = Arc::new(());
            held.push(Arc::downgrade(&part));
            part
        };
        let mut held = Vec::new();
        let (ticket, _) = board.post(group, 0, Name("x"), part(&mut held)).unwrap();
        let elsewhere = announce(&mut board, group, 1, Name("x")).unwrap();
        if failed {
            board.fail(panicked(0));
        } else {
            board.release(ticket);
            assert!(board.groups[0].entries.is_empty());
        }
        assert!(!board.provide_data(elsewhere, part(&mut held)));
        drop(board.take_freed());
        assert!(
            held.iter().all(|held| held.upgrade().is_none()),
            "failed: {failed}"
        );
    }
}

#[test]
fn invariant_7_what_is_found_here_ends_nothing_until_it_is_decided() {
    let (mut board, group) = board(3);
    board.arbiter.defer();
    let (ticket, _) = board.post(group, 0, Name("x"), 0).unwrap();
    let wait = Wait::All(ticket);
    assert!(board.post(group, 1, Name("y"), 1).is_err());
    assert!(board.arbiter.is_undecided() && !board.is_over(wait));
    assert!(matches!(
        board.arbiter.take_unsent(),
        Some((
            Failure::Collective(CommError::Mismatch { rank: 1, .. }),
            false
        ))
    ));
    assert!(board.arbiter.take_unsent().is_none(), "it is reported once");
    // A later failure is not reported.
    board.fail(panicked(0));
    assert!(board.arbiter.take_unsent().is_none());
    // A collective whose ranks disagree is never complete.
    let elsewhere = announce(&mut board, group, 2, Name("x")).unwrap();
    assert!(!board.provide_data(elsewhere, 2) && !board.is_over(wait));
    board.decide(panicked(7));
    assert!(!board.arbiter.is_undecided() && board.is_over(wait));
    assert!(matches!(
        board.failure(),
        Some(Failure::Panicked { rank: 7, .. })
    ));
    assert!(
        board.arbiter.take_unsent().is_none(),
        "the process that decides has notified the others"
    );
    board.decide(panicked(8));
    assert!(
        matches!(board.failure(), Some(Failure::Panicked { rank: 7, .. })),
        "the first failure is the only one"
    );
}

#[test]
fn invariant_7_without_a_decision_the_process_decides_by_itself() {
    let (mut board, _) = board(2);
    board.arbiter.defer();
    board.fail(panicked(1));
    assert!(board.arbiter.take_unsent().is_some() && board.arbiter.take_unsent().is_none());
    board.decide_here();
    assert!(matches!(
        board.failure(),
        Some(Failure::Panicked { rank: 1, .. })
    ));
    assert!(
        board.arbiter.take_unsent().is_some(),
        "only the process that is lost was notified before"
    );
    let (mut board, _) = super::tests::board(2);
    board.arbiter.defer();
    board.decide_here();
    assert!(board.failure().is_none());
    board.fail(panicked(0));
    assert!(board.failure().is_some());
}

#[test]
fn invariant_6_data_on_demand_is_pulled_once_a_rank_needs_it() {
    let (mut board, group) = board(3);
    let (first, asked) = offer(&mut board, group, 2, Name("x")).unwrap();
    assert!(!asked);
    let here = [0, 1].map(|member| board.post(group, member, Name("x"), member).unwrap().0);
    assert!(
        board.is_complete(here[0]) && !board.is_over(Wait::All(here[0])),
        "no rank needs to be waited for"
    );
    assert_eq!(board.request(here[1]), [first]);
    assert!(!board.is_complete(here[0]));
    assert!(board.request(here[0]).is_empty(), "it is requested once");
    assert!(board.provide_data(first, 2));
    assert_eq!(ready(&mut board, here[0]), Some(vec![0, 1, 2]));
    // If the result is needed before the offer arrives.
    let (ticket, _) = board.post(group, 0, Name("x"), 0).unwrap();
    assert!(board.request(ticket).is_empty());
    assert!(offer(&mut board, group, 2, Name("x")).unwrap().1);
}

#[test]
fn invariant_6_an_offer_is_declined_once_all_have_given_up() {
    let (mut board, group) = board(3);
    let (offered, _) = offer(&mut board, group, 2, Name("x")).unwrap();
    let here = [0, 1].map(|member| board.post(group, member, Name("x"), member).unwrap().0);
    board.release(here[0]);
    assert!(board.take_declined().is_empty());
    board.release(here[1]);
    assert_eq!(board.take_declined(), [offered]);
    assert!(board.take_declined().is_empty());
    // Offers that arrive later are also declined.
    let here = [0, 1].map(|member| board.post(group, member, Name("x"), member).unwrap().0);
    here.into_iter().for_each(|ticket| board.release(ticket));
    let (offer, asked) = offer(&mut board, group, 2, Name("x")).unwrap();
    assert!(!asked);
    assert_eq!(board.take_declined(), [offer]);
}

/// For example from a process that sends unrequested data.
#[test]
fn a_contribution_that_no_rank_awaits_changes_nothing() {
    let (mut board, group) = board(2);
    let (ticket, _) = board.post(group, 0, Name("x"), 0).unwrap();
    for stray in [
        ticket,
        OpHandle {
            member: 1,
            ..ticket
        },
        OpHandle { seq: 9, ..ticket },
        OpHandle {
            member: 9,
            ..ticket
        },
    ] {
        assert!(!board.provide_data(stray, 7));
    }
    assert_eq!(board.take_freed().len(), 4);
    let elsewhere = announce(&mut board, group, 1, Name("x")).unwrap();
    assert!(board.provide_data(elsewhere, 1) && !board.provide_data(elsewhere, 8));
    assert_eq!(ready(&mut board, ticket), Some(vec![0, 1]));
}

/// Also while an earlier call keeps its entry in the table.
#[test]
fn data_of_a_released_call_is_freed() {
    let (mut board, group) = board(2);
    let here = [(); 2].map(|()| board.post(group, 0, Name("x"), 0).unwrap().0);
    let there = [(); 2].map(|()| announce(&mut board, group, 1, Name("x")).unwrap());
    board.release(here[1]);
    assert_eq!(
        board.take_freed().len(),
        1,
        "the contribution of the local rank"
    );
    assert!(board.signature(there[1]).is_none() && !board.provide_data(there[1], 7));
    assert_eq!(board.take_freed().len(), 1);
    assert!(
        board.provide_data(there[0], 1),
        "the earlier call is not affected"
    );
}

mod messages {
    use super::*;

    fn message(from: usize, tag: u32) -> P2pMessage<Name, Option<usize>> {
        P2pMessage {
            from,
            tag,
            signature: Name("x"),
            part: None,
        }
    }

    fn receive(board: &mut Plain, group: GroupKey, from: Option<usize>) -> RecvHandle {
        board.receive(group, 0, from, 0, Name("x")).unwrap()
    }

    fn arrived(board: &mut Plain, receive_handle: RecvHandle) -> Option<(usize, usize)> {
        match board.poll_message(receive_handle) {
            Poll::Ready(message) => Some((message.from, message.part)),
            _ => None,
        }
    }

    /// Also for a receive from any rank: the message that was announced first is received first,
    /// even if another message's data arrives first.
    #[test]
    fn are_taken_in_the_order_in_which_they_are_announced() {
        let (mut board, group) = board(3);
        let first = board.send(group, 0, message(1, 0)).unwrap().0;
        let receives = [Some(1), None].map(|from| receive(&mut board, group, from));
        let second = board.send(group, 0, message(2, 0)).unwrap().0;
        let third = board.send(group, 0, message(1, 0)).unwrap().0;
        assert!(board.provide_message(second, 20));
        assert!(!board.provide_message(third, 11), "no rank waits for it");
        assert!(
            !board.is_over(Wait::Message(receives[0]))
                && arrived(&mut board, receives[0]).is_none()
        );
        assert_eq!(arrived(&mut board, receives[1]), Some((2, 20)));
        assert!(board.provide_message(first, 10));
        assert_eq!(arrived(&mut board, receives[0]), Some((1, 10)));
        let receive_handle = receive(&mut board, group, Some(1));
        assert_eq!(arrived(&mut board, receive_handle), Some((1, 11)));
    }

    #[test]
    fn that_are_announced_are_not_missed_though_the_sender_returns() {
        let (mut board, group) = board(2);
        let announced = board.send(group, 0, message(1, 0)).unwrap().0;
        let receive_handle = receive(&mut board, group, None);
        board.returned(1);
        board.begin_wait(Wait::Message(receive_handle));
        assert!(board.failure().is_none());
        assert_eq!(
            (board.waits, board.missing(Wait::Message(receive_handle))),
            (1, vec![1])
        );
        assert!(board.provide_message(announced, 5));
        assert_eq!(
            (board.waits, arrived(&mut board, receive_handle)),
            (0, Some((1, 5)))
        );
    }

    #[test]
    fn whose_receive_was_given_up_are_freed_when_they_have_come() {
        for failed in [false, true] {
            let (mut board, group) = board(2);
            let announced = board.send(group, 0, message(1, 0)).unwrap().0;
            let receive_handle = receive(&mut board, group, None);
            if failed {
                board.fail(panicked(1));
            }
            board.release_receive(receive_handle);
            drop(board.take_freed());
            board.provide_message(announced, 5);
            assert_eq!(
                board
                    .take_freed()
                    .iter()
                    .map(|part| part.to_vec())
                    .collect::<Vec<_>>(),
                [[5]]
            );
            assert!(board.groups[0].queues[0].is_empty());
        }
    }

    #[test]
    fn that_no_receive_will_take_are_freed_when_they_have_come() {
        let (mut board, group) = board(2);
        let announced = board.send(group, 0, message(1, 0)).unwrap().0;
        board.fail(panicked(1));
        drop(board.take_freed());
        assert!(!board.provide_message(announced, 5));
        assert_eq!(board.take_freed().len(), 1);
    }

    #[test]
    fn that_are_not_what_a_receive_expects_are_a_mismatch_when_they_are_announced() {
        let (mut board, group) = board(2);
        receive(&mut board, group, Some(1));
        let other = P2pMessage {
            signature: Name("y"),
            ..message(1, 0)
        };
        let Err(CommError::Mismatch {
            rank: 0, other: 1, ..
        }) = board.send(group, 0, other)
        else {
            panic!()
        };
    }
}
