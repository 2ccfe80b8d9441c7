//! Point-to-point messages.

use super::cases::{dtypes, shapes};
use super::plain::PlainTensor;
use super::scope::TestGroup;
use crate::Result;
use crate::comm::{Call, Work};

/// Checks messages between every two ranks, including a rank and itself; their order and tags;
/// receives from any rank; many messages at once; and receives and sends that are dropped.
pub(super) fn messages(scope: &TestGroup) -> Result<()> {
    every_pair(scope)?;
    tags_and_order(scope)?;
    from_any_rank(scope)?;
    given_up(scope)
}

fn call() -> Call {
    Call::new("message")
}

/// Checks messages between every two ranks, or with few cases between neighbours. Each rank sends
/// first, then receives in the opposite order, with and without `metas`.
fn every_pair(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let comm = &scope.comm;
    let near = |other: usize| {
        !scope.has_few() || (other + size - rank) % size < 3 || (rank + size - other) % size < 3
    };
    for (tag, dtype) in (0..).zip(dtypes(scope)) {
        let plains = |from: usize| {
            shapes(scope)
                .into_iter()
                .map(move |shape| PlainTensor::sample(&shape, from, dtype))
        };
        let sends: Vec<_> = (0..size)
            .filter(|to| near(*to))
            .map(|to| {
                let tensors =
                    plains(rank * size + to).map(|plain| plain.tensor(dtype, &scope.device));
                comm.send(call(), tensors.collect(), to, tag)
            })
            .collect();
        for from in (0..size).rev().filter(|from| near(*from)) {
            let metas = (from % 2 == 0).then(|| plains(0).map(|plain| plain.meta(dtype)).collect());
            let message = comm.receive(call(), metas, from, tag).wait()?;
            let got: Vec<_> = message
                .tensors
                .into_iter()
                .map(|tensor| PlainTensor::of(tensor, dtype))
                .collect();
            scope.same(message.from, from, || "sender".into());
            scope.same(got, plains(from * size + rank).collect(), || {
                format!("{dtype:?} of {from}")
            });
        }
        sends.into_iter().try_for_each(Work::wait)?;
    }
    Ok(())
}

/// Creates the tensors of a message that contains a number.
pub(super) fn number(scope: &TestGroup, value: usize) -> Vec<burn::backend::DispatchTensor> {
    let plain = PlainTensor {
        shape: vec![1],
        values: vec![value as i64],
    };
    vec![plain.tensor(burn::tensor::DType::I32, &scope.device)]
}

pub(super) fn read(mut tensors: Vec<burn::backend::DispatchTensor>) -> usize {
    PlainTensor::of(tensors.remove(0), burn::tensor::DType::I32).values[0] as usize
}

/// Checks that messages with one tag arrive in order, and that messages with another tag do not
/// block them.
fn tags_and_order(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let comm = &scope.comm;
    let next = (rank + 1) % size;
    let last = (rank + size - 1) % size;
    for value in 0..6 {
        comm.send(call(), number(scope, value), next, 100 + value as u32 % 2)
            .wait()?;
    }
    // All are posted first, and waited for in reverse order.
    let odd: Vec<_> = (0..3)
        .map(|_| comm.receive(call(), None, last, 101))
        .collect();
    let even: Vec<_> = (0..3)
        .map(|_| comm.receive(call(), None, last, 100))
        .collect();
    for (at, work) in even.into_iter().enumerate().rev() {
        scope.same(read(work.wait()?.tensors), 2 * at, || "even tag".into());
    }
    for (at, work) in odd.into_iter().enumerate().rev() {
        scope.same(read(work.wait()?.tensors), 2 * at + 1, || "odd tag".into());
    }
    Ok(())
}

/// Checks that the first rank receives the messages of all ranks with `from` unspecified, in any
/// order of the senders but in order for each sender.
fn from_any_rank(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let comm = &scope.comm;
    const EACH: usize = 5;
    if rank > 0 || size == 1 {
        for value in 0..EACH {
            comm.send(call(), number(scope, value), 0, 7).wait()?;
        }
    }
    if rank == 0 {
        let mut heard = vec![0; size];
        for _ in 0..EACH * (size - 1).max(1) {
            let message = comm.receive(call(), None, None, 7).wait()?;
            scope.same(read(message.tensors), heard[message.from], || {
                format!("of rank {}", message.from)
            });
            heard[message.from] += 1;
        }
    }
    Ok(())
}

/// Checks that a dropped receive still consumes its message, and that a message without a receive
/// does not block others.
fn given_up(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let comm = &scope.comm;
    let next = (rank + 1) % size;
    let last = (rank + size - 1) % size;
    drop(comm.receive(call(), None, last, 8));
    for value in 0..2 {
        comm.send(call(), number(scope, value), next, 8).wait()?;
    }
    scope.same(
        read(comm.receive(call(), None, last, 8).wait()?.tensors),
        1,
        || "after one given up".into(),
    );
    // This message is never received, not even in a later group of the same ranks.
    drop(comm.send(call(), number(scope, 0), next, u32::MAX));
    comm.barrier(call()).wait()?;
    Ok(())
}
