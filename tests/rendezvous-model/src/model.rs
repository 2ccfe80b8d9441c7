//! Programs of a few ranks, under many schedules.

use std::time::Duration;

use shuttle::sync::Arc;
use shuttle::thread;

use crate::comm::local::board::{Failure, Fingerprint, GroupKey};
use crate::comm::local::rendezvous::Rendezvous;
use crate::comm::{CommError, Op};

struct Label(&'static str);

impl Fingerprint for Label {
    fn op(&self) -> Op {
        Op::Barrier
    }

    fn label(&self) -> std::sync::Arc<str> {
        self.0.into()
    }

    fn difference(&self, other: &Self) -> Option<String> {
        (self.0 != other.0).then(String::new)
    }
}

/// Every check, by name.
pub const CHECKS: [(&str, fn()); 6] = [
    ("all_meet_round_after_round", all_meet_round_after_round),
    (
        "works_in_flight_may_be_waited_for_in_any_order_or_dropped",
        works_in_flight_may_be_waited_for_in_any_order_or_dropped,
    ),
    ("a_panic_wakes_every_group", a_panic_wakes_every_group),
    ("an_early_return_wakes_those_who_need_the_rank", an_early_return_wakes_those_who_need_the_rank),
    ("a_mismatch_reaches_everyone", a_mismatch_reaches_everyone),
    ("a_cycle_of_waits_is_found_by_whoever_closes_it", a_cycle_of_waits_is_found_by_whoever_closes_it),
];

type World = Rendezvous<Label, usize>;

const FAR: Duration = Duration::from_secs(3600);
const SCHEDULES: usize = 1000;

/// Runs `program` on `ranks` threads, with and without spinning.
///
/// A rank does not report its return: that would wake others who should have been woken before.
fn check(ranks: usize, program: fn(usize, &World, GroupKey)) {
    for spins in [0, 2] {
        let run = move || {
            let world = Arc::new(World::new(ranks, spins));
            let all: Vec<_> = (0..ranks).collect();
            let threads: Vec<_> = (0..ranks)
                .map(|rank| {
                    let (world, all) = (world.clone(), all.clone());
                    thread::spawn(move || program(rank, &world, world.group(&all, "")))
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        };
        shuttle::check_random(run, SCHEDULES);
        shuttle::check_pct(run, SCHEDULES, 3);
    }
}

fn meet(
    world: &World,
    group: GroupKey,
    member: usize,
    label: &'static str,
    part: usize,
) -> Result<Vec<usize>, CommError> {
    let ticket = world.join(group, member, Label(label), part)?;
    Ok(world.wait(ticket, FAR)?.to_vec())
}

fn all_meet_round_after_round() {
    check(3, |rank, world, group| {
        for round in 0..3 {
            assert_eq!(meet(world, group, rank, "x", round).unwrap(), [round; 3]);
        }
    });
}

fn works_in_flight_may_be_waited_for_in_any_order_or_dropped() {
    check(2, |rank, world, group| {
        let [a, b, c] = [10, 20, 30].map(|part| world.join(group, rank, Label("x"), part + rank).unwrap());
        let (first, second) = if rank == 0 { (a, c) } else { (c, a) };
        world.release(b);
        for ticket in [first, second] {
            let parts = world.wait(ticket, FAR).unwrap();
            assert_eq!(parts[1], parts[0] + 1);
        }
    });
}

fn a_panic_wakes_every_group() {
    check(4, |rank, world, group| {
        let result = match rank {
            3 => {
                world.fail(Failure::Panicked { rank, message: String::new() });
                return;
            }
            2 => meet(world, world.group(&[2, 3], ""), 0, "x", 0),
            _ => meet(world, group, rank, "x", 0),
        };
        assert!(matches!(result, Err(CommError::RankPanicked { rank: 3, .. })));
    });
}

fn an_early_return_wakes_those_who_need_the_rank() {
    check(3, |rank, world, group| {
        if rank == 1 {
            world.returned(rank);
        } else {
            let error = meet(world, group, rank, "x", 0).unwrap_err();
            assert!(matches!(error, CommError::RankLeft { rank: 1, .. }), "{error}");
        }
    });
}

fn a_mismatch_reaches_everyone() {
    check(3, |rank, world, group| {
        let label = if rank == 1 { "other" } else { "x" };
        let error = meet(world, group, rank, label, 0).unwrap_err();
        assert!(matches!(error, CommError::Mismatch { rank, other, .. } if rank == 1 || other == 1), "{error}");
    });
}

fn a_cycle_of_waits_is_found_by_whoever_closes_it() {
    check(3, |rank, world, _| {
        let pairs = [[0, 1], [1, 2], [2, 0]];
        let error = meet(world, world.group(&pairs[rank], ""), 0, "right", 0).unwrap_err();
        assert!(matches!(&error, CommError::Deadlock { waits } if waits.len() == 3), "{error}");
    });
}
