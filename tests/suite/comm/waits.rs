//! Who is waited for, how many collectives are under way, and what the ledger says of it.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use burn::tensor::Tensor;
use burn_dtensor::comm::{
    Call, CommError, Communicator, Phase, QueueDepth, ReduceOp, ShardedTensor, Work, World,
};
use burn_dtensor::placement::ShardSizes;
use serde_json::{Value, json};

use super::run;

/// Tells the last of a group that the others have posted.
struct Posted {
    tell: Sender<()>,
    told: Mutex<Receiver<()>>,
}

impl Posted {
    fn new() -> Self {
        let (tell, told) = channel();
        Self {
            tell,
            told: Mutex::new(told),
        }
    }

    /// Has rank `last` of `ranks` post once all others have.
    fn post<T>(
        &self,
        rank: usize,
        last: usize,
        ranks: usize,
        post: impl FnOnce() -> Work<T>,
    ) -> Work<T> {
        if rank == last {
            let told = self.told.lock().unwrap();
            (1..ranks).for_each(|_| {
                told.recv_timeout(Duration::from_secs(60))
                    .expect("the others post")
            });
            return post();
        }
        let work = post();
        self.tell.send(()).expect("the last listens");
        work
    }
}

/// The ranks that were waited for, in how many waits.
fn stragglers(world: &World) -> Vec<(usize, u64)> {
    let mut stragglers: Vec<_> = world
        .ledger()
        .waits()
        .stragglers()
        .iter()
        .map(|each| (each.rank, each.waits))
        .collect();
    stragglers.sort();
    stragglers
}

#[test]
fn the_rank_that_came_last_is_the_one_waited_for() {
    let posted = [2, 1, 2, 0].map(|last| (last, Posted::new()));
    run(3, |world| {
        for (last, posted) in &posted {
            posted
                .post(world.rank(), *last, 3, || {
                    world.all().barrier("late".into())
                })
                .wait()?;
        }
        // None for itself.
        let expected: Vec<_> = [(0, 1), (1, 1), (2, 2)]
            .into_iter()
            .filter(|(rank, _)| *rank != world.rank())
            .collect();
        assert_eq!(stragglers(world), expected);
        let waits = world.ledger().waits();
        assert_eq!(waits.count(), 4);
        assert_eq!(waits.total(), world.ledger().spent().waiting);
        assert!(
            waits
                .stragglers()
                .iter()
                .map(|each| each.waiting)
                .sum::<Duration>()
                <= waits.total()
        );
        Ok(())
    });
}

/// In a group whose order is not that of the ranks, and where the result is made of another.
#[test]
fn the_straggler_is_named_by_its_global_rank_in_every_group() {
    let posted = [Posted::new(), Posted::new()];
    run(4, |world| {
        if world.rank() == 0 {
            return Ok(());
        }
        let group = world.group(&[3, 1, 2])?;
        let [list, sum] = &posted;
        let nothing = || group.all_to_all_list("list".into(), vec![None; 3], vec![None; 3]);
        list.post(world.rank(), 3, 3, nothing).wait()?;
        let ones = || vec![Tensor::<1>::ones([5], world.device()).into_dispatch()];
        sum.post(world.rank(), 3, 3, || {
            group.all_reduce("sum".into(), ones(), ReduceOp::Sum)
        })
        .wait()?;
        assert_eq!(
            stragglers(world),
            if world.rank() == 3 {
                vec![]
            } else {
                vec![(3, 2)]
            }
        );
        Ok(())
    });
}

/// A result that is there before it is wanted was waited for by nobody, though somebody came last.
#[test]
fn a_late_wait_ends_with_who_came_last_too() {
    let (posted, gone) = (Posted::new(), Posted::new());
    run(2, |world| {
        let work = posted.post(world.rank(), 1, 2, || world.all().barrier("late".into()));
        gone.post(world.rank(), 0, 2, || {
            world.all().barrier("both have posted".into())
        })
        .wait()?;
        assert!(work.is_complete());
        work.wait()?;
        // Each came last once.
        assert_eq!(stragglers(world), [(1 - world.rank(), 1)]);
        Ok(())
    });
}

fn depth(world: &World) -> (u64, u64) {
    let QueueDepth { now, most } = world.ledger().queue_depth();
    (now, most)
}

#[test]
fn the_queue_holds_what_is_neither_waited_for_nor_dropped() {
    run(2, |world| {
        let (comm, device) = (world.all(), world.device());
        let sum = |call: Call| {
            comm.all_reduce(
                call,
                vec![Tensor::<1>::ones([3], device).into_dispatch()],
                ReduceOp::Sum,
            )
        };
        assert_eq!(depth(world), (0, 0));
        let [first, second, third] = ["a", "b", "c"].map(|label| sum(label.into()));
        assert_eq!(depth(world), (3, 3));
        third.wait()?;
        assert_eq!(depth(world), (2, 3));
        // Ahead: counted from its wait on, under way from now on; mapped: still one.
        let deferred = sum(Call::new("d").with_deferred())
            .then(|sums| sums.len())
            .then(|sums| sums + 1);
        let list = comm.all_to_all_list("e".into(), vec![None; 2], vec![None; 2]);
        assert_eq!(
            (depth(world), world.ledger().summary().total.calls),
            ((4, 4), 4)
        );
        drop(second);
        assert_eq!(depth(world), (3, 4));
        assert_eq!(deferred.wait()?, 2);
        list.wait()?;
        assert_eq!(
            (depth(world), world.ledger().summary().total.calls),
            ((1, 4), 5)
        );
        world.ledger().reset();
        assert_eq!(depth(world), (1, 1), "what is under way stays");
        // A group of one rank has nothing under way.
        let alone = world.group(&[world.rank()])?.barrier("alone".into());
        assert_eq!(depth(world), (1, 1));
        alone.wait()?;
        first.wait_timeout(Duration::from_secs(60))?;
        assert_eq!(depth(world), (0, 1));
        Ok(())
    });
}

#[test]
fn a_failed_collective_leaves_the_queue() {
    run(2, |world| {
        let label = if world.rank() == 0 { "one" } else { "other" };
        let error = world.all().barrier(label.into()).wait().unwrap_err();
        assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
        assert_eq!(depth(world).0, 0);
        assert_eq!(world.ledger().waits().count(), 0);
        Ok(())
    });
}

/// Some collectives of several kinds.
fn some(world: &World, comm: &Communicator) -> Result<(), CommError> {
    let tensor = |rows: usize| Tensor::<2>::ones([rows, 3], world.device()).into_dispatch();
    let shard = ShardedTensor {
        tensor: tensor(1),
        dim: 0,
        sizes: ShardSizes::Chunked(2),
    };
    let forward = Call::new("block").with_phase(Phase::Forward);
    comm.all_gather(forward.clone(), vec![shard.clone()])
        .wait()?;
    comm.all_gather(forward, vec![shard]).wait()?;
    comm.all_reduce(
        Call::new("norm").with_phase(Phase::Backward),
        vec![tensor(4)],
        ReduceOp::Sum,
    )
    .wait()?;
    comm.barrier("end \"of it\"".into()).wait()
}

#[test]
fn json_says_what_the_ledger_says() {
    run(2, |world| {
        some(world, &world.all())?;
        let held = world.all().barrier("held".into());
        let (ledger, text) = (world.ledger(), world.ledger().to_json());
        let json: Value = serde_json::from_str(&text).unwrap();
        // By hand: 2 x 6 and 12 elements of four bytes.
        let collective = |operation: &str, phase: &str, label: &str, calls: u64, bytes: u64| json!({ "operation": operation, "phase": phase, "label": label, "calls": calls, "bytes": bytes });
        let collectives = [
            collective("all_gather", "forward", "block", 2, 48),
            collective("all_reduce", "backward", "norm", 1, 48),
            collective("barrier", "other", "end \"of it\"", 1, 0),
            collective("barrier", "other", "held", 1, 0),
        ];
        assert_eq!(json["collectives"], Value::from(collectives.to_vec()));
        assert_eq!((&json["calls"], &json["bytes"]), (&json!(5), &json!(96)));
        assert_eq!(json["queue"], json!({ "now": 1, "most": 1 }));
        assert_eq!(json["backends"], json!(["flex"]));
        assert_eq!(
            json["copied"],
            json!({ "launches": 0, "bytes": 0, "padding": 0 })
        );
        let nanos = |key: &str| Duration::from_nanos(json[key].as_u64().unwrap());
        let spent = ledger.spent();
        assert_eq!(
            (nanos("waiting_ns"), nanos("moving_ns")),
            (spent.waiting, spent.local_work)
        );
        let (waits, said) = (ledger.waits(), &json["waits"]);
        assert_eq!(said["count"], 4);
        let buckets = said["histogram"].as_array().unwrap();
        let numbers = |bucket: &Value| {
            (
                bucket["from_us"].as_u64().unwrap(),
                bucket["waits"].as_u64().unwrap(),
            )
        };
        let told: Vec<_> = waits
            .times()
            .iter()
            .map(|(from, count)| (from.as_micros() as u64, count))
            .collect();
        assert_eq!(buckets.iter().map(numbers).collect::<Vec<_>>(), told);
        let told: Vec<_> = waits
            .stragglers()
            .iter()
            .map(|each| json!({ "rank": each.rank, "waits": each.waits, "waiting_ns": each.waiting.as_nanos() as u64 }))
            .collect();
        assert_eq!(said["stragglers"], Value::from(told));
        held.wait()?;
        Ok(())
    });
}

#[test]
fn the_summary_is_one_line_of_all_of_it() {
    let posted = Posted::new();
    run(2, |world| {
        let tensor = Tensor::<1>::ones([500_000], world.device()).into_dispatch();
        let sum = || {
            world
                .all()
                .all_reduce("sum".into(), vec![tensor], ReduceOp::Sum)
        };
        posted.post(world.rank(), 0, 2, sum).wait()?;
        let line = world.ledger().summary().to_string();
        assert_eq!(line.lines().count(), 1);
        assert!(line.starts_with("1 collective, 2.0 MB; waiting "), "{line}");
        assert!(line.contains("; 1 in flight at most"), "{line}");
        let straggler = "; rank 0 came last in 1 of 1 waits, ";
        assert_eq!(line.contains(straggler), world.rank() == 1, "{line}");
        Ok(())
    });
}
