//! Tests of [`Rendezvous`].

use std::thread;

use super::*;
use crate::comm::Op;

struct Same;

impl Signature for Same {
    fn op(&self) -> Op {
        Op::Barrier
    }

    fn label(&self) -> Arc<str> {
        "".into()
    }

    fn difference(&self, _other: &Self) -> Option<String> {
        None
    }
}

type Plain = Rendezvous<Same, usize>;

const FAR: Duration = Duration::from_secs(3600);

/// Runs `program` on `ranks` threads that share a rendezvous.
fn run(ranks: usize, lingers: SpinPolicy, program: impl Fn(usize, &Plain, GroupKey) + Sync) {
    let rendezvous = Plain::new(ranks, lingers, false);
    let all: Vec<_> = (0..ranks).collect();
    thread::scope(|scope| {
        for rank in 0..ranks {
            let rendezvous = &rendezvous;
            let program = &program;
            let all = &all;
            scope.spawn(move || program(rank, rendezvous, rendezvous.group(all, "")));
        }
    });
}

#[test]
fn every_rank_gets_every_deposit_round_after_round() {
    for lingers in [
        SpinPolicy::Spinning(0),
        SpinPolicy::Spinning(100),
        SpinPolicy::Yielding(10, LINGER),
    ] {
        run(5, lingers, |rank, rendezvous, group| {
            for round in 0..2000 {
                let (ticket, _) = rendezvous
                    .post(group, rank, Same, 10 * round + rank)
                    .unwrap();
                let Matched { parts, .. } = rendezvous.wait(ticket, FAR).unwrap();
                assert!(
                    parts
                        .iter()
                        .copied()
                        .eq((0..5).map(|rank| 10 * round + rank))
                );
            }
        });
    }
}

#[test]
fn a_failure_wakes_the_waiters_of_every_group() {
    for _ in 0..200 {
        run(
            4,
            SpinPolicy::Yielding(1, LINGER),
            |rank, rendezvous, group| {
                if rank == 3 {
                    rendezvous.fail(Failure::Panicked {
                        rank,
                        message: "boom".into(),
                    });
                    return;
                }
                // Ranks 0 and 1 wait for rank 3. Rank 2 waits for it in a separate group.
                let (group, member) = if rank < 2 {
                    (group, rank)
                } else {
                    (rendezvous.group(&[2, 3], ""), 0)
                };
                let result = rendezvous
                    .post(group, member, Same, 0)
                    .and_then(|(ticket, _)| rendezvous.wait(ticket, FAR));
                assert!(matches!(
                    result,
                    Err(CommError::RankPanicked { rank: 3, .. })
                ));
            },
        );
    }
}

#[test]
fn the_first_failure_aborts_the_data_planes_once() {
    let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = calls.clone();
    let rendezvous = Plain::new(2, SpinPolicy::Spinning(1), false).with_abort(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    });
    let count = || calls.load(std::sync::atomic::Ordering::Relaxed);
    let group = rendezvous.group(&[0, 1], "");
    let (op, _) = rendezvous.post(group, 0, Same, 0).unwrap();
    assert_eq!(count(), 0);
    rendezvous
        .wait(op, Duration::ZERO)
        .err()
        .expect("rank 1 is missing");
    assert_eq!(count(), 1);
    rendezvous.fail(Failure::Failed {
        rank: 1,
        message: "later".into(),
    });
    assert_eq!(count(), 1);
}

#[test]
fn a_deadline_names_who_is_missing() {
    run(3, SpinPolicy::Spinning(0), |rank, rendezvous, group| {
        if rank != 1 {
            let result = rendezvous.post(group, rank, Same, 0);
            let result =
                result.and_then(|(ticket, _)| rendezvous.wait(ticket, Duration::from_millis(20)));
            assert!(
                matches!(result, Err(CommError::DeadlineExceeded { missing, .. }) if missing == [1])
            );
        }
    });
}
