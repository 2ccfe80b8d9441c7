//! Gathers, reductions and changes of the sharded dimension.

use burn::tensor::DType;
use itertools::Itertools;

use super::cases::{cases, dtypes, fits, held, ops, shapes, shard, shard_sizes};
use super::plain::PlainTensor;
use super::scope::TestGroup;
use crate::Result;
use crate::comm::{Call, ReduceOp, ShardedTensor};

/// Checks that every rank gets the full tensor.
pub(super) fn all_gather(scope: &TestGroup) -> Result<()> {
    for (shape, dim, dtype) in cases(scope) {
        for sizes in shard_sizes(shape[dim], scope.size()) {
            let full = PlainTensor::sample(&shape, 0, dtype);
            let block = shard(&full, dim, sizes.clone(), dtype, scope);
            let gathered = scope
                .comm
                .all_gather(Call::default(), vec![block])
                .wait()?
                .remove(0);
            scope.same(PlainTensor::of(gathered, dtype), full, || {
                format!("{shape:?} dim {dim} {sizes:?} {dtype:?}")
            });
        }
    }
    Ok(())
}

/// Gathers a list with many shapes, dtypes, dimensions and shard sizes in one call.
pub(super) fn all_gather_coalesced(scope: &TestGroup) -> Result<()> {
    let full_tensors: Vec<_> = cases(scope)
        .map(|(shape, dim, dtype)| (PlainTensor::sample(&shape, 1, dtype), dim, dtype))
        .collect();
    let shard = |(at, (full, dim, dtype)): (usize, &(PlainTensor, usize, _))| {
        let sizes = shard_sizes(full.shape[*dim], scope.size())[at % 2].clone();
        shard(full, *dim, sizes, *dtype, scope)
    };
    let blocks = full_tensors.iter().enumerate().map(shard).collect();
    let gathered = scope.comm.all_gather(Call::new("unit"), blocks).wait()?;
    scope.same(gathered.len(), full_tensors.len(), || {
        "number of tensors".into()
    });
    for (gathered, (full, dim, dtype)) in gathered.into_iter().zip(full_tensors) {
        scope.same(PlainTensor::of(gathered, dtype), full, || {
            format!("dim {dim} {dtype:?}")
        });
    }
    Ok(())
}

/// Checks that every rank gets the tensors of all ranks, stacked in a new first dimension.
pub(super) fn all_gather_stacked(scope: &TestGroup) -> Result<()> {
    let all = || {
        shapes(scope)
            .into_iter()
            .cartesian_product(dtypes(scope))
            .filter(|(shape, _)| shape.len() < 3)
    };
    let own = all().map(|(shape, dtype)| {
        PlainTensor::sample(&shape, scope.rank(), dtype).tensor(dtype, &scope.device)
    });
    let stacks = scope
        .comm
        .all_gather_stacked(Call::new("stack"), own.collect())
        .wait()?;
    scope.same(stacks.len(), all().count(), || "number of tensors".into());
    for (stack, (shape, dtype)) in stacks.into_iter().zip(all()) {
        let values = (0..scope.size())
            .flat_map(|rank| PlainTensor::sample(&shape, rank, dtype).values)
            .collect();
        let expected = PlainTensor {
            shape: [&[scope.size()], &shape[..]].concat(),
            values,
        };
        scope.same(PlainTensor::of(stack, dtype), expected, || {
            format!("{shape:?} {dtype:?}")
        });
    }
    Ok(())
}

/// Checks that every rank gets its shard of the reduction.
pub(super) fn reduce_scatter(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    for (shape, dim, dtype) in cases(scope) {
        let all: Vec<_> = (0..size)
            .map(|rank| PlainTensor::sample(&shape, rank, dtype))
            .collect();
        for op in ops(scope, &shape)
            .into_iter()
            .filter(|op| fits(*op, dtype, scope))
        {
            let reduced = PlainTensor::reduced(&all, op, dtype);
            for sizes in shard_sizes(shape[dim], size) {
                let full = ShardedTensor {
                    tensor: all[rank].tensor(dtype, &scope.device),
                    dim,
                    sizes: sizes.clone(),
                };
                let part = scope
                    .comm
                    .reduce_scatter(Call::default(), vec![full], op)
                    .wait()?
                    .remove(0);
                let expected = reduced.narrow(dim, held(&sizes, size, rank));
                scope.same(PlainTensor::of(part, dtype), expected, || {
                    format!("{shape:?} dim {dim} {sizes:?} {dtype:?} {op:?}")
                });
            }
        }
    }
    Ok(())
}

/// Checks that every rank gets the reduction.
pub(super) fn all_reduce(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    // Long enough for ranks to divide the work among them.
    let long = [DType::F32, DType::BF16, DType::I32]
        .map(|dtype| (vec![150, 300], dtype, vec![ReduceOp::Sum]));
    let all = shapes(scope).into_iter().cartesian_product(dtypes(scope));
    let all = all.map(|(shape, dtype)| (shape.clone(), dtype, ops(scope, &shape)));
    for (shape, dtype, ops) in all.chain(long.into_iter().filter(|_| !scope.has_few())) {
        let all: Vec<_> = (0..size)
            .map(|rank| PlainTensor::sample(&shape, rank, dtype))
            .collect();
        for op in ops.into_iter().filter(|op| fits(*op, dtype, scope)) {
            let tensor = all[rank].tensor(dtype, &scope.device);
            let reduced = scope
                .comm
                .all_reduce(Call::default(), vec![tensor], op)
                .wait()?
                .remove(0);
            let expected = PlainTensor::reduced(&all, op, dtype);
            scope.same(PlainTensor::of(reduced, dtype), expected, || {
                format!("{shape:?} {dtype:?} {op:?}")
            });
        }
    }
    Ok(())
}

/// Checks that a list with every shape and dtype is reduced like each of its tensors.
pub(super) fn all_reduce_coalesced(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let pairs = || shapes(scope).into_iter().cartesian_product(dtypes(scope));
    for op in ops(scope, &[]) {
        let cases = || {
            pairs()
                .filter(|(shape, dtype)| ops(scope, shape).contains(&op) && fits(op, *dtype, scope))
        };
        let term = |rank: usize, shape: &[usize], dtype| PlainTensor::sample(shape, rank, dtype);
        let tensors = cases()
            .map(|(shape, dtype)| term(rank, &shape, dtype).tensor(dtype, &scope.device))
            .collect();
        let reduced = scope.comm.all_reduce(Call::default(), tensors, op).wait()?;
        scope.same(reduced.len(), cases().count(), || {
            format!("number of tensors, {op:?}")
        });
        for (reduced, (shape, dtype)) in reduced.into_iter().zip(cases()) {
            let all: Vec<_> = (0..size).map(|rank| term(rank, &shape, dtype)).collect();
            scope.same(
                PlainTensor::of(reduced, dtype),
                PlainTensor::reduced(&all, op, dtype),
                || format!("{shape:?} {dtype:?} {op:?}"),
            );
        }
    }
    Ok(())
}

/// Checks that the sharding is moved to another dimension.
pub(super) fn all_to_all(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    for (shape, dim, dtype) in cases(scope) {
        for to_dim in (0..shape.len()).filter(|to_dim| *to_dim != dim) {
            let pairs = shard_sizes(shape[dim], size)
                .map(|sizes| shard_sizes(shape[to_dim], size).map(|to| (sizes.clone(), to)));
            for (sizes, to_sizes) in pairs.into_iter().flatten() {
                let full = PlainTensor::sample(&shape, 0, dtype);
                let block = shard(&full, dim, sizes.clone(), dtype, scope);
                let recut = scope
                    .comm
                    .all_to_all(Call::default(), block, to_dim, to_sizes.clone())
                    .wait()?;
                let expected = full.narrow(to_dim, held(&to_sizes, size, rank));
                scope.same(PlainTensor::of(recut, dtype), expected, || {
                    format!("{shape:?} {dim} {sizes:?} -> {to_dim} {to_sizes:?} {dtype:?}")
                });
            }
        }
    }
    Ok(())
}

/// Runs several barriers with messages between them. `order` checks that no rank leaves a barrier
/// early.
pub(super) fn barrier(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    for round in 0..10 {
        scope
            .comm
            .send(Call::new("before"), vec![], (rank + 1) % size, round)
            .wait()?;
        scope.comm.barrier(Call::new("barrier")).wait()?;
        let message = scope
            .comm
            .receive(
                Call::new("before"),
                Some(vec![]),
                (rank + size - 1) % size,
                round,
            )
            .wait()?;
        scope.same(message.from, (rank + size - 1) % size, || {
            format!("round {round}, rank {rank}")
        });
    }
    let sums = scope
        .comm
        .all_reduce(Call::default(), vec![], ReduceOp::Sum)
        .wait()?;
    scope.same(sums.len(), 0, || "an empty list".into());
    Ok(())
}
