//! Tests of the invariants of [`MembershipAgreement`], by their numbers.

use super::*;

/// Returns the state of three processes of two ranks each, as each process has it.
fn three() -> [MembershipAgreement; 3] {
    [0, 1, 2].map(|here| MembershipAgreement::new([0..2, 2..4, 4..6], here))
}

/// Returns the state of the only process, which has these ranks.
fn alone(ranks: Range<usize>) -> MembershipAgreement {
    MembershipAgreement::new(std::iter::once(ranks), 0)
}

fn came(rank: usize) -> MembershipMessage {
    MembershipMessage::Came { rank }
}

fn roster(ranks: &[usize]) -> MembershipMessage {
    MembershipMessage::Roster {
        ranks: ranks.to_vec(),
    }
}

#[test]
fn those_that_have_come_go_on_once_no_rank_is_open() {
    let mut muster = alone(0..3);
    muster.came(2);
    muster.came(0);
    assert_eq!((muster.decide(), muster.open()), (None, vec![1]));
    muster.gone(1);
    assert_eq!(muster.decide(), Some(roster(&[0, 2])));
    assert_eq!(muster.roster().unwrap()[..], [0, 2]);
}

#[test]
fn who_is_gone_does_not_come_and_who_has_come_does_not_go() {
    let mut muster = alone(0..2);
    muster.gone(0);
    muster.came(0);
    muster.came(1);
    muster.gone(1);
    assert_eq!(muster.decide(), Some(roster(&[1])));
}

#[test]
fn an_empty_set_of_survivors_is_no_world() {
    let mut muster = alone(0..2);
    muster.gone(0);
    muster.gone(1);
    assert_eq!(muster.decide(), None);
}

/// Invariant 1.
#[test]
fn the_first_process_decides_and_any_could() {
    let mut all = three();
    for (here, muster) in all.iter_mut().enumerate() {
        for rank in 0..6 {
            match rank {
                3 => muster.gone(3),
                rank if rank / 2 == here => muster.came(rank),
                rank => assert_eq!(muster.hear(rank / 2, came(rank)), Ok(None)),
            }
        }
    }
    assert_eq!(
        all.each_mut().map(MembershipAgreement::decide),
        [Some(roster(&[0, 1, 2, 4, 5])), None, None]
    );
}

/// Invariants 2 and 4.
#[test]
fn a_roster_is_passed_on_once() {
    let [_, mut second, _] = three();
    assert_eq!(second.hear(0, roster(&[0, 2])), Ok(Some(roster(&[0, 2]))));
    assert_eq!(
        second.hear(2, roster(&[0, 2, 4])),
        Ok(None),
        "the first roster is the only one"
    );
    assert_eq!(second.roster().unwrap()[..], [0, 2]);
}

/// Invariant 3.
#[test]
fn who_decides_for_a_lost_process_waits_until_all_have_missed_it() {
    let [_, mut second, _] = three();
    for rank in [2, 3] {
        second.came(rank);
    }
    for (from, rank) in [(0, 0), (0, 1), (2, 4), (2, 5)] {
        assert_eq!(second.hear(from, came(rank)), Ok(None));
    }
    assert_eq!(second.decide(), None, "process 0 decides");
    assert!(second.lost(0) && !second.lost(0));
    assert_eq!(
        second.decide(),
        None,
        "process 2 may use a roster of process 0"
    );
    assert_eq!(
        second.hear(2, MembershipMessage::Missed { process: 0 }),
        Ok(None)
    );
    assert_eq!(second.decide(), Some(roster(&[2, 3, 4, 5])));
}

/// Invariant 3: a message that the lost process sent to one process only is forwarded before the
/// notification of the loss.
#[test]
fn a_roster_that_one_has_heard_of_counts_for_all() {
    let [_, mut second, _] = three();
    second.came(2);
    second.gone(3);
    assert_eq!(
        [second.hear(2, came(4)), second.hear(2, came(5))],
        [Ok(None), Ok(None)]
    );
    second.lost(0);
    assert!(second.hear(2, roster(&[0, 2, 4, 5])).unwrap().is_some());
    assert_eq!(
        second.hear(2, MembershipMessage::Missed { process: 0 }),
        Ok(None)
    );
    assert_eq!(second.decide(), None);
    assert_eq!(second.roster().unwrap()[..], [0, 2, 4, 5]);
}

/// Invariant 5.
#[test]
fn no_rank_waits_for_a_process_without_ranks() {
    let mut second = MembershipAgreement::new([0..0, 0..1, 1..2, 2..2], 1);
    second.came(0);
    second.gone(1);
    assert_eq!(
        second.decide(),
        Some(roster(&[0])),
        "process 0 has no ranks"
    );
    let mut third = MembershipAgreement::new([0..0, 0..1, 1..2, 2..2], 2);
    third.came(1);
    [0, 1]
        .into_iter()
        .for_each(|process| assert!(third.lost(process)));
    assert_eq!(third.decide(), Some(roster(&[1])));
}

#[test]
fn of_a_lost_process_nothing_counts() {
    let [mut first, ..] = three();
    first.lost(2);
    assert_eq!(first.hear(2, roster(&[4])), Ok(None));
    assert_eq!(first.roster(), None);
    assert_eq!(first.open(), [0, 1, 2, 3], "its ranks are gone");
}

#[test]
fn what_cannot_be_right_is_said() {
    let [mut first, ..] = three();
    for wrong in [
        came(2),
        MembershipMessage::Gone { ranks: vec![6] },
        MembershipMessage::Missed { process: 3 },
        roster(&[]),
        roster(&[1, 0]),
    ] {
        assert!(first.hear(2, wrong.clone()).is_err(), "{wrong:?}");
    }
}
