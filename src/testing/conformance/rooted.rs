//! Collectives with a root, for every root.

use super::cases::{cases, fits, held, ops, shard_sizes};
use super::plain::PlainTensor;
use super::scope::TestGroup;
use crate::Result;
use crate::comm::Call;

/// Returns the roots to try: all, or with many ranks the first, one in the middle and the last.
fn roots(scope: &TestGroup) -> Vec<usize> {
    let size = scope.size();
    if size <= 8 {
        (0..size).collect()
    } else {
        vec![0, size / 2, size - 1]
    }
}

/// Checks that every rank gets the root's tensor.
pub(super) fn broadcast(scope: &TestGroup) -> Result<()> {
    for (shape, _, dtype) in cases(scope) {
        for root in roots(scope) {
            let full = PlainTensor::sample(&shape, root, dtype);
            let tensors = (scope.rank() == root).then(|| vec![full.tensor(dtype, &scope.device)]);
            let copy = scope
                .comm
                .broadcast(Call::default(), tensors, vec![full.meta(dtype)], root)
                .wait()?
                .remove(0);
            scope.same(PlainTensor::of(copy, dtype), full, || {
                format!("{shape:?} {dtype:?} of {root}")
            });
        }
    }
    Ok(())
}

/// Checks that every rank gets its shard of the root's tensor, or the tensor that the root has for
/// it.
pub(super) fn scatter(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let comm = &scope.comm;
    for (shape, dim, dtype) in cases(scope) {
        for root in roots(scope) {
            let full = PlainTensor::sample(&shape, root, dtype);
            for sizes in shard_sizes(shape[dim], size) {
                let tensors = (rank == root).then(|| vec![full.tensor(dtype, &scope.device)]);
                let shardings = vec![(dim, sizes.clone())];
                let part = comm
                    .scatter(
                        Call::default(),
                        tensors,
                        vec![full.meta(dtype)],
                        shardings,
                        root,
                    )
                    .wait()?
                    .remove(0);
                let expected = full.narrow(dim, held(&sizes, size, rank));
                scope.same(PlainTensor::of(part, dtype), expected, || {
                    format!("{shape:?} dim {dim} {sizes:?} {dtype:?} of {root}")
                });
            }
            // The tensors have different lengths.
            let own = |rank: usize| PlainTensor::sample(&[scope.length(rank % 3), 2], rank, dtype);
            let tensors = (rank == root).then(|| {
                (0..size)
                    .map(|rank| own(rank).tensor(dtype, &scope.device))
                    .collect()
            });
            let got = comm
                .scatter_list(Call::default(), tensors, own(rank).meta(dtype), root)
                .wait()?;
            scope.same(PlainTensor::of(got, dtype), own(rank), || {
                format!("list {dtype:?} of {root}")
            });
        }
    }
    Ok(())
}

/// Checks that the root gets the reduction and the others get nothing.
pub(super) fn reduce(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    for (shape, dim, dtype) in cases(scope).filter(|(_, dim, _)| *dim == 0) {
        let all: Vec<_> = (0..size)
            .map(|rank| PlainTensor::sample(&shape, rank, dtype))
            .collect();
        for op in ops(scope, &shape)
            .into_iter()
            .filter(|op| fits(*op, dtype, scope))
        {
            for root in roots(scope) {
                let tensor = || vec![all[rank].tensor(dtype, &scope.device)];
                let expected = (rank == root).then(|| PlainTensor::reduced(&all, op, dtype));
                // Reduces twice to check that the second reduction does not start from the result
                // of the first.
                for _ in 0..2 {
                    let reduced = scope
                        .comm
                        .reduce(Call::default(), tensor(), op, root)
                        .wait()?;
                    let reduced =
                        reduced.map(|mut reduced| PlainTensor::of(reduced.remove(0), dtype));
                    scope.same(reduced.as_ref(), expected.as_ref(), || {
                        format!("{shape:?} {dim} {dtype:?} {op:?} on {root}")
                    });
                }
            }
        }
    }
    Ok(())
}

/// Checks that the root gets every rank's tensor, of any shape, and the others get nothing.
pub(super) fn gather(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    for (mut shape, dim, dtype) in cases(scope) {
        for root in roots(scope) {
            let mut of = |rank: usize| {
                shape[dim] = scope.length(rank % 4);
                PlainTensor::sample(&shape, rank, dtype)
            };
            let tensor = of(rank).tensor(dtype, &scope.device);
            let all = (rank == root).then(|| (0..size).map(of).collect::<Vec<_>>());
            let metas = all
                .as_ref()
                .map(|all| all.iter().map(|plain| plain.meta(dtype)).collect());
            let gathered = scope
                .comm
                .gather(Call::default(), tensor, metas, root)
                .wait()?;
            let gathered = gathered.map(|all| {
                all.into_iter()
                    .map(|one| PlainTensor::of(one, dtype))
                    .collect::<Vec<_>>()
            });
            scope.same(gathered, all, || format!("dim {dim} {dtype:?} on {root}"));
        }
    }
    Ok(())
}
