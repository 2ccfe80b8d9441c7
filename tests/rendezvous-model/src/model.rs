//! Programs of a few ranks, under many schedules.

use std::sync::Arc;
use std::time::Duration;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Runner, thread};

use crate::comm::backend::Failure;
use crate::comm::control::match_table::{CallData, DataMode, GroupKey, P2pMessage, Signature};
use crate::comm::control::rendezvous::{LINGER, Matched, Rendezvous, SpinPolicy};
use crate::comm::control::sync::FAR;
use crate::comm::{CommError, Op};

struct Label(&'static str);

impl Signature for Label {
    fn op(&self) -> Op {
        Op::Barrier
    }

    fn label(&self) -> Arc<str> {
        self.0.into()
    }

    fn difference(&self, other: &Self) -> Option<String> {
        (self.0 != other.0).then(String::new)
    }
}

/// Every check, by name.
pub const CHECKS: [(&str, fn(Schedules)); 19] = [
    ("all_meet_round_after_round", all_meet_round_after_round),
    (
        "all_are_told_of_one_that_came_last",
        all_are_told_of_one_that_came_last,
    ),
    (
        "works_in_flight_may_be_waited_for_in_any_order_or_dropped",
        works_in_flight_may_be_waited_for_in_any_order_or_dropped,
    ),
    ("a_panic_wakes_every_group", a_panic_wakes_every_group),
    (
        "an_early_return_wakes_those_who_need_the_rank",
        an_early_return_wakes_those_who_need_the_rank,
    ),
    (
        "an_early_return_leaves_what_the_rank_took_part_in",
        an_early_return_leaves_what_the_rank_took_part_in,
    ),
    ("a_mismatch_reaches_everyone", a_mismatch_reaches_everyone),
    (
        "a_cycle_of_waits_is_found_by_the_rank_that_closes_it",
        a_cycle_of_waits_is_found_by_the_rank_that_closes_it,
    ),
    (
        "a_deadline_wakes_those_whose_own_is_far",
        a_deadline_wakes_those_whose_own_is_far,
    ),
    (
        "a_rank_just_in_time_is_in_time_for_everyone",
        a_rank_just_in_time_is_in_time_for_everyone,
    ),
    (
        "threads_of_a_rank_wait_at_once_where_declared",
        threads_of_a_rank_wait_at_once_where_declared,
    ),
    (
        "threads_of_a_rank_that_wait_at_once_are_told",
        threads_of_a_rank_that_wait_at_once_are_told,
    ),
    (
        "every_contribution_is_freed_once_no_rank_needs_it",
        every_contribution_is_freed_once_no_rank_needs_it,
    ),
    (
        "a_failure_frees_every_deposit",
        a_failure_frees_every_deposit,
    ),
    (
        "messages_wake_who_waits_for_them",
        messages_wake_who_waits_for_them,
    ),
    (
        "deposits_of_another_process_wake_who_waits_for_them",
        deposits_of_another_process_wake_who_waits_for_them,
    ),
    (
        "messages_of_another_process_wake_who_waits_for_them",
        messages_of_another_process_wake_who_waits_for_them,
    ),
    (
        "the_last_to_return_wakes_who_waits_for_the_end",
        the_last_to_return_wakes_who_waits_for_the_end,
    ),
    (
        "a_failed_world_ends_without_a_rank_that_does_not",
        a_failed_world_ends_without_a_rank_that_does_not,
    ),
];

/// What ranks deposit: a number, and what shows whether it is still there.
struct Part(usize, #[expect(dead_code, reason = "counted")] Arc<()>);

type World = Rendezvous<Label, Part>;

/// A deadline that may pass at any time.
const NEAR: Duration = Duration::from_secs(1);

/// Which schedules to try.
#[derive(Clone, Copy)]
pub struct Schedules {
    pub seed: u64,
    /// Of each check.
    pub count: usize,
}

impl Schedules {
    /// Runs `program` on `ranks` threads, half of the schedules with lingering; half are random,
    /// half have few preemptions (PCT).
    ///
    /// A rank does not report its return unless `program` does: that would wake others who should
    /// have been woken before.
    fn check(self, ranks: usize, program: fn(usize, &Arc<World>, GroupKey)) {
        self.check_world(ranks, false, program);
    }

    fn check_world(
        self,
        ranks: usize,
        multithreaded: bool,
        program: fn(usize, &Arc<World>, GroupKey),
    ) {
        for lingers in [SpinPolicy::Spinning(0), SpinPolicy::Yielding(2, LINGER)] {
            let run = move || {
                let world = Arc::new(World::new(ranks, lingers, multithreaded));
                let all: Vec<_> = (0..ranks).collect();
                let threads: Vec<_> = (0..ranks)
                    .map(|rank| {
                        let (world, all) = (world.clone(), all.clone());
                        thread::spawn(move || program(rank, &world, world.group(&all, "")))
                    })
                    .collect();
                threads
                    .into_iter()
                    .for_each(|thread| thread.join().unwrap());
            };
            let count = self.count.div_ceil(4);
            let random = RandomScheduler::new_from_seed(self.seed, count);
            Runner::new(random, Default::default()).run(run);
            let pct = PctScheduler::new_from_seed(self.seed, 3, count);
            Runner::new(pct, Default::default()).run(run);
        }
    }
}

fn meet(
    world: &World,
    group: GroupKey,
    member: usize,
    label: &'static str,
    part: usize,
) -> Result<Vec<usize>, CommError> {
    meet_until(FAR, world, group, member, label, part)
}

fn meet_until(
    deadline: Duration,
    world: &World,
    group: GroupKey,
    member: usize,
    label: &'static str,
    part: usize,
) -> Result<Vec<usize>, CommError> {
    let (ticket, _) = world.post(group, member, Label(label), Part(part, Arc::default()))?;
    Ok(world
        .wait(ticket, deadline)?
        .parts
        .iter()
        .map(|part| part.0)
        .collect())
}

fn all_meet_round_after_round(schedules: Schedules) {
    schedules.check(3, |rank, world, group| {
        for round in 0..3 {
            assert_eq!(meet(world, group, rank, "x", round).unwrap(), [round; 3]);
        }
    });
}

fn all_are_told_of_one_that_came_last(schedules: Schedules) {
    schedules.check(3, |rank, world, group| {
        let (ticket, _) = world
            .post(group, rank, Label("x"), Part(0, Arc::default()))
            .unwrap();
        let Matched { last, .. } = world.wait(ticket, FAR).unwrap();
        assert_eq!(meet(world, group, rank, "y", last).unwrap(), [last; 3]);
    });
}

fn works_in_flight_may_be_waited_for_in_any_order_or_dropped(schedules: Schedules) {
    schedules.check(2, |rank, world, group| {
        let issue = |part| {
            world
                .post(group, rank, Label("x"), Part(part + rank, Arc::default()))
                .unwrap()
                .0
        };
        let [a, b, c] = [10, 20, 30].map(issue);
        let (first, second) = if rank == 0 { (a, c) } else { (c, a) };
        world.release(b);
        for ticket in [first, second] {
            let Matched { parts, .. } = world.wait(ticket, FAR).unwrap();
            assert_eq!(parts[1].0, parts[0].0 + 1);
        }
    });
}

fn a_panic_wakes_every_group(schedules: Schedules) {
    schedules.check(4, |rank, world, group| {
        let result = match rank {
            3 => {
                world.fail(Failure::Panicked {
                    rank,
                    message: String::new(),
                });
                return;
            }
            2 => meet(world, world.group(&[2, 3], ""), 0, "x", 0),
            _ => meet(world, group, rank, "x", 0),
        };
        assert!(matches!(
            result,
            Err(CommError::RankPanicked { rank: 3, .. })
        ));
    });
}

fn an_early_return_wakes_those_who_need_the_rank(schedules: Schedules) {
    schedules.check(3, |rank, world, group| {
        if rank == 1 {
            world.returned(rank);
        } else {
            let error = meet(world, group, rank, "x", 0).unwrap_err();
            assert!(
                matches!(error, CommError::RankReturned { rank: 1, .. }),
                "{error}"
            );
        }
    });
}

/// Ranks return at different times, each after its last call.
fn an_early_return_leaves_what_the_rank_took_part_in(schedules: Schedules) {
    schedules.check(3, |rank, world, group| {
        let first = meet(world, group, rank, "x", rank);
        assert_eq!(first.unwrap(), [0, 1, 2]);
        let (pair, last) = (
            world.group(&[0, 1], ""),
            world.post(group, rank, Label("y"), Part(rank, Arc::default())),
        );
        match rank {
            // Takes part, and does not wait.
            2 => world.release(last.unwrap().0),
            _ => {
                assert_eq!(world.wait(last.unwrap().0, FAR).unwrap().parts.len(), 3);
                assert_eq!(meet(world, pair, rank, "z", rank).unwrap(), [0, 1]);
            }
        }
        world.returned(rank);
    });
}

fn a_mismatch_reaches_everyone(schedules: Schedules) {
    schedules.check(3, |rank, world, group| {
        let label = if rank == 1 { "other" } else { "x" };
        let error = meet(world, group, rank, label, 0).unwrap_err();
        assert!(
            matches!(error, CommError::Mismatch { rank, other, .. } if rank == 1 || other == 1),
            "{error}"
        );
    });
}

fn a_cycle_of_waits_is_found_by_the_rank_that_closes_it(schedules: Schedules) {
    schedules.check(3, |rank, world, _| {
        let pairs = [[0, 1], [1, 2], [2, 0]];
        let error = meet(world, world.group(&pairs[rank], ""), 0, "right", 0).unwrap_err();
        assert!(
            matches!(&error, CommError::Deadlock { waits } if waits.len() == 3),
            "{error}"
        );
    });
}

fn a_deadline_wakes_those_whose_own_is_far(schedules: Schedules) {
    schedules.check(3, |rank, world, group| {
        let deadline = if rank == 0 { NEAR } else { FAR };
        if rank != 2 {
            let error = meet_until(deadline, world, group, rank, "x", 0).unwrap_err();
            // Whoever sees only the failure has not joined; it was missing then.
            let CommError::DeadlineExceeded {
                rank: 0, missing, ..
            } = &error
            else {
                panic!("{error}")
            };
            assert!(missing.contains(&2) && !missing.contains(&0), "{missing:?}");
        }
    });
}

/// The deadline passes, or it does not: ranks agree on which.
fn a_rank_just_in_time_is_in_time_for_everyone(schedules: Schedules) {
    schedules.check(2, |rank, world, group| {
        let deadline = if rank == 0 { NEAR } else { FAR };
        match meet_until(deadline, world, group, rank, "x", rank) {
            // A deadline that came too late has failed nothing: the next call is as good.
            Ok(parts) => {
                assert_eq!(parts, [0, 1]);
                assert_eq!(meet(world, group, rank, "y", rank).unwrap(), [0, 1]);
            }
            Err(error) => assert!(
                matches!(error, CommError::DeadlineExceeded { rank: 0, .. }),
                "{error}"
            ),
        }
    });
}

/// Every rank has a thread for each of two groups.
fn on_two_threads(
    rank: usize,
    world: &Arc<World>,
    group: GroupKey,
) -> [Result<Vec<usize>, CommError>; 2] {
    let other = {
        let world = world.clone();
        thread::spawn(move || {
            let group = world.group(&[1, 0], "");
            meet(&world, group, 1 - rank, "other", rank)
        })
    };
    let own = meet(world, group, rank, "own", rank);
    [own, other.join().unwrap()]
}

fn threads_of_a_rank_wait_at_once_where_declared(schedules: Schedules) {
    schedules.check_world(2, true, |rank, world, group| {
        let [own, other] = on_two_threads(rank, world, group);
        assert_eq!((own.unwrap(), other.unwrap()), (vec![0, 1], vec![1, 0]));
    });
}

/// Undeclared, they meet or are told; nobody waits for good, and nobody is told anything else.
fn threads_of_a_rank_that_wait_at_once_are_told(schedules: Schedules) {
    schedules.check(2, |rank, world, group| {
        for result in on_two_threads(rank, world, group) {
            let told = |error| {
                matches!(
                    error,
                    CommError::ConcurrentCalls { .. } | CommError::Deadlock { .. }
                )
            };
            assert!(result.is_ok() || result.is_err_and(told));
        }
    });
}

fn every_contribution_is_freed_once_no_rank_needs_it(schedules: Schedules) {
    schedules.check(2, |rank, world, group| {
        let mine: [Arc<()>; 3] = Default::default();
        let [held, waited, dropped] = mine.each_ref().map(|part| {
            world
                .post(group, rank, Label("x"), Part(rank, part.clone()))
                .unwrap()
                .0
        });
        assert_eq!(world.wait(waited, FAR).unwrap().parts.len(), 2);
        world.release(dropped);
        // The first is not waited for; the later ones go all the same, when the other rank is done
        // too.
        meet(world, group, rank, "both are done", 0).unwrap();
        let alive = mine.each_ref().map(|part| Arc::strong_count(part) > 1);
        assert_eq!(alive, [true, false, false]);
        world.release(held);
    });
}

fn a_failure_frees_every_deposit(schedules: Schedules) {
    schedules.check(3, |rank, world, group| {
        let mine: Arc<()> = Default::default();
        if rank == 2 {
            world.fail(Failure::Panicked {
                rank,
                message: String::new(),
            });
        } else if let Ok((ticket, _)) =
            world.post(group, rank, Label("x"), Part(rank, mine.clone()))
        {
            // Never waited for and never released, as by a program that leaks it.
            let _ = ticket;
            meet(world, group, rank, "y", 0).unwrap_err();
            // Whoever failed drops it, perhaps in a moment; shuttle ends what looks for ever.
            while Arc::strong_count(&mine) > 1 {
                thread::yield_now();
            }
        }
    });
}

fn messages_wake_who_waits_for_them(schedules: Schedules) {
    schedules.check(3, |rank, world, group| {
        let send = |to: usize, part: usize| {
            let message = P2pMessage {
                from: rank,
                tag: 0,
                signature: Label("x"),
                part: Some(Part(part, Arc::default())),
            };
            world.send(group, to, message).unwrap();
        };
        let receive =
            |from: Option<usize>| world.receive(group, rank, from, 0, Label("x")).unwrap();
        let take = |claim| {
            world
                .wait_for_message(claim, FAR)
                .map(|message| (message.from, message.part.0))
                .unwrap()
        };
        if rank > 0 {
            (0..2).for_each(|part| send(0, part));
            assert_eq!(take(receive(Some(0))), (0, 10 * rank));
            return;
        }
        // Of each in order, whoever is first; one posted ahead, one given up.
        let (deferred, given_up) = (receive(None), receive(Some(2)));
        world.release_receive(given_up);
        let mut heard = [0; 3];
        for claim in [deferred, receive(Some(1))] {
            let (from, part) = take(claim);
            assert!(part >= heard[from]);
            heard[from] = part + 1;
        }
        (1..3).for_each(|to| send(to, 10 * to));
    });
}

/// Rank 2 is elsewhere: its thread is that which brings its joins, and its deposits later.
fn deposits_of_another_process_wake_who_waits_for_them(schedules: Schedules) {
    schedules.check(3, |rank, world, group| {
        if rank < 2 {
            for round in 0..3 {
                assert_eq!(meet(world, group, rank, "x", round).unwrap(), [round; 3]);
            }
            return;
        }
        let announced = [0, 1, 2].map(|round| {
            (
                round,
                world
                    .post(group, 2, Label("x"), CallData::Remote(DataMode::Eager))
                    .unwrap()
                    .0,
            )
        });
        let [first, second, third] = announced;
        for (round, ticket) in [second, first, third] {
            world.provide_data(ticket, Part(round, Arc::default()));
        }
    });
}

fn messages_of_another_process_wake_who_waits_for_them(schedules: Schedules) {
    schedules.check(2, |rank, world, group| {
        if rank == 0 {
            for (from, part) in [(Some(1), 0), (None, 1)] {
                let claim = world.receive(group, 0, from, 0, Label("x")).unwrap();
                assert_eq!(world.wait_for_message(claim, FAR).unwrap().part.0, part);
            }
            return;
        }
        let message = || P2pMessage {
            from: 1,
            tag: 0,
            signature: Label("x"),
            part: None,
        };
        let [first, second] = [0, 1].map(|_| world.send(group, 0, message()).unwrap());
        world.provide_message(second, Part(1, Arc::default()));
        world.provide_message(first, Part(0, Arc::default()));
    });
}

fn the_last_to_return_wakes_who_waits_for_the_end(schedules: Schedules) {
    schedules.check(3, |rank, world, _| {
        world.returned(rank);
        assert!(world.finish(FAR).is_empty(), "every rank has ended");
        assert!(world.read(|table| table.running()).is_empty());
    });
}

/// Rank 2 never returns. The others wait for it without a deadline until the world has failed.
fn a_failed_world_ends_without_a_rank_that_does_not(schedules: Schedules) {
    schedules.check(3, |rank, world, _| {
        if rank == 2 {
            return;
        }
        if rank == 0 {
            world.fail(Failure::Panicked {
                rank,
                message: String::new(),
            });
        }
        world.returned(rank);
        assert!(world.finish(NEAR).contains(&2));
    });
}
