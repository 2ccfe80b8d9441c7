//! Calls that are not waited for in the order in which they were posted.

use super::messages::{number, read};
use super::scope::TestGroup;
use crate::Result;
use crate::comm::{Call, Communicator, ReduceOp, Work};

/// Checks that calls are matched by the order of posting, whichever calls ranks wait for and in
/// whichever order, and that a correct program gets no error.
pub(super) fn order(scope: &TestGroup) -> Result<()> {
    waited_for_backwards(scope)?;
    posted_on_several_channels(scope)?;
    given_up(scope)?;
    incomplete(scope)
}

fn call() -> Call {
    Call::new("order")
}

/// Posts an all-reduce of the sum over the ranks of `value` plus the rank.
fn sum(scope: &TestGroup, comm: &Communicator, value: usize) -> Work<usize> {
    comm.all_reduce(call(), number(scope, value + scope.rank()), ReduceOp::Sum)
        .then(read)
}

#[track_caller]
fn is_sum(scope: &TestGroup, sum: usize, value: usize, case: &str) {
    scope.same(
        sum,
        (0..scope.size()).map(|rank| value + rank).sum(),
        || case.into(),
    );
}

/// Every other rank waits for its calls in reverse order.
fn waited_for_backwards(scope: &TestGroup) -> Result<()> {
    let mut works: Vec<_> = (0..4)
        .map(|value| (value, sum(scope, &scope.comm, value)))
        .collect();
    if !scope.rank().is_multiple_of(2) {
        works.reverse();
    }
    for (value, work) in works {
        is_sum(scope, work.wait()?, value, "waited for backwards");
    }
    Ok(())
}

/// Every other rank posts on several groups in the opposite order. The groups differ in name, or
/// contain the same ranks in another order.
fn posted_on_several_channels(scope: &TestGroup) -> Result<()> {
    let TestGroup { comm, reversed, .. } = scope;
    let comms = [
        comm.duplicate("first"),
        comm.duplicate("second"),
        reversed.duplicate("first"),
    ];
    let mut works: Vec<_> = comms.iter().enumerate().collect();
    if !scope.rank().is_multiple_of(2) {
        works.reverse();
    }
    let works: Vec<_> = works
        .into_iter()
        .map(|(at, comm)| (at, sum(scope, comm, 10 * at)))
        .collect();
    for (at, work) in works {
        is_sum(scope, work.wait()?, 10 * at, "posted on several channels");
    }
    // A name stands for one channel, whichever duplicate it is asked for.
    let around = comm.duplicate("second").duplicate("first");
    for (value, comm) in [&comms[0], &around, &comms[0]].into_iter().enumerate() {
        is_sum(
            scope,
            sum(scope, comm, value).wait()?,
            value,
            "a duplicate of a duplicate",
        );
    }
    Ok(())
}

/// One rank drops its request. The other ranks still get their results, and no rank gets the result
/// of another call.
fn given_up(scope: &TestGroup) -> Result<()> {
    for value in 0..scope.size().min(8) {
        let work = sum(scope, &scope.comm, value);
        if scope.rank() == value {
            drop(work);
        } else {
            is_sum(scope, work.wait()?, value, "given up by a rank");
        }
    }
    is_sum(
        scope,
        sum(scope, &scope.comm, 9).wait()?,
        9,
        "after others that were given up",
    );
    Ok(())
}

/// The first rank enters the barrier only after all others have checked that it is incomplete.
fn incomplete(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let comm = &scope.comm;
    let barrier = if rank == 0 {
        for from in 1..size {
            comm.receive(call(), Some(vec![]), from, 9).wait()?;
        }
        comm.barrier(call())
    } else {
        let barrier = comm.barrier(call());
        scope.same(barrier.is_complete(), false, || {
            "complete without the first rank".into()
        });
        comm.send(call(), vec![], 0, 9).wait()?;
        barrier
    };
    Ok(barrier.wait()?)
}
