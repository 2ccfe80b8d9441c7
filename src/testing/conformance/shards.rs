//! Gathers, reductions and cuts anew.

use super::cases::{cases, cuts, dtypes, fits, held, ops, piece, shapes};
use super::plain::Plain;
use super::scope::Scope;
use crate::Result;
use crate::comm::{Call, ReduceOp, Sharded};

/// Every rank gets the whole.
pub(super) fn all_gather(scope: &Scope) -> Result<()> {
    for (shape, dim, dtype) in cases(scope) {
        for cut in cuts(shape[dim], scope.size()) {
            let whole = Plain::sample(&shape, 0, dtype);
            let piece = piece(&whole, dim, cut.clone(), dtype, scope);
            let gathered = scope.comm.all_gather(Call::default(), vec![piece]).wait()?.remove(0);
            scope.same(Plain::of(gathered, dtype), whole, || format!("{shape:?} dim {dim} {cut:?} {dtype:?}"));
        }
    }
    Ok(())
}

/// A list of any shapes, dtypes, dimensions and cuts.
pub(super) fn all_gather_coalesced(scope: &Scope) -> Result<()> {
    let wholes: Vec<_> =
        cases(scope).map(|(shape, dim, dtype)| (Plain::sample(&shape, 1, dtype), dim, dtype)).collect();
    let shard = |(at, (whole, dim, dtype)): (usize, &(Plain, usize, _))| {
        let cut = cuts(whole.shape[*dim], scope.size())[at % 2].clone();
        piece(whole, *dim, cut, *dtype, scope)
    };
    let pieces = wholes.iter().enumerate().map(shard).collect();
    let gathered = scope.comm.all_gather(Call::new("unit"), pieces).wait()?;
    scope.same(gathered.len(), wholes.len(), || "number of tensors".into());
    for (gathered, (whole, dim, dtype)) in gathered.into_iter().zip(wholes) {
        scope.same(Plain::of(gathered, dtype), whole, || format!("dim {dim} {dtype:?}"));
    }
    Ok(())
}

/// Every rank gets its part of the reduction.
pub(super) fn reduce_scatter(scope: &Scope) -> Result<()> {
    let (size, rank) = (scope.size(), scope.rank());
    for (shape, dim, dtype) in cases(scope) {
        for op in ops(scope).into_iter().filter(|op| fits(*op, dtype, scope)) {
            for cut in cuts(shape[dim], size) {
                let all: Vec<_> = (0..size).map(|rank| Plain::sample(&shape, rank, dtype)).collect();
                let whole = Sharded { tensor: all[rank].tensor(dtype, &scope.device), dim, cut: cut.clone() };
                let part = scope.comm.reduce_scatter(Call::default(), vec![whole], op).wait()?.remove(0);
                let expected = Plain::reduced(&all, op, dtype).narrow(dim, held(&cut, size, rank));
                let case = || format!("{shape:?} dim {dim} {cut:?} {dtype:?} {op:?}");
                scope.same(Plain::of(part, dtype), expected, case);
            }
        }
    }
    Ok(())
}

/// Every rank gets the reduction.
pub(super) fn all_reduce(scope: &Scope) -> Result<()> {
    let (size, rank) = (scope.size(), scope.rank());
    let large = vec![vec![40_003], vec![150, 300]];
    for shape in shapes(scope).into_iter().chain(large.into_iter().filter(|_| size < 16)) {
        for dtype in dtypes(scope) {
            let all: Vec<_> = (0..size).map(|rank| Plain::sample(&shape, rank, dtype)).collect();
            let tensor = all[rank].tensor(dtype, &scope.device);
            for op in ops(scope).into_iter().filter(|op| fits(*op, dtype, scope)) {
                let reduced = scope.comm.all_reduce(Call::default(), vec![tensor.clone()], op).wait()?.remove(0);
                let expected = Plain::reduced(&all, op, dtype);
                scope.same(Plain::of(reduced, dtype), expected, || format!("{shape:?} {dtype:?} {op:?}"));
            }
        }
    }
    Ok(())
}

/// A list is reduced as each of its tensors.
pub(super) fn all_reduce_coalesced(scope: &Scope) -> Result<()> {
    let (size, rank) = (scope.size(), scope.rank());
    for op in ops(scope) {
        let cases = || {
            shapes(scope)
                .into_iter()
                .zip(dtypes(scope).into_iter().cycle().skip(3))
                .filter(|case| fits(op, case.1, scope))
        };
        let term = |rank: usize, shape: &[usize], dtype| Plain::sample(shape, rank, dtype);
        let tensors = cases().map(|(shape, dtype)| term(rank, &shape, dtype).tensor(dtype, &scope.device)).collect();
        let reduced = scope.comm.all_reduce(Call::default(), tensors, op).wait()?;
        scope.same(reduced.len(), cases().count(), || format!("number of tensors, {op:?}"));
        for (reduced, (shape, dtype)) in reduced.into_iter().zip(cases()) {
            let all: Vec<_> = (0..size).map(|rank| term(rank, &shape, dtype)).collect();
            scope.same(Plain::of(reduced, dtype), Plain::reduced(&all, op, dtype), || {
                format!("{shape:?} {dtype:?} {op:?}")
            });
        }
    }
    Ok(())
}

/// The cut moves to another dimension.
pub(super) fn all_to_all(scope: &Scope) -> Result<()> {
    let (size, rank) = (scope.size(), scope.rank());
    for (shape, dim, dtype) in cases(scope) {
        for to_dim in (0..shape.len()).filter(|to_dim| *to_dim != dim) {
            let pairs = cuts(shape[dim], size).map(|cut| cuts(shape[to_dim], size).map(|to| (cut.clone(), to)));
            for (cut, to_cut) in pairs.into_iter().flatten() {
                let whole = Plain::sample(&shape, 0, dtype);
                let piece = piece(&whole, dim, cut.clone(), dtype, scope);
                let recut = scope.comm.all_to_all(Call::default(), piece, to_dim, to_cut.clone()).wait()?;
                let expected = whole.narrow(to_dim, held(&to_cut, size, rank));
                let case = || format!("{shape:?} {dim} {cut:?} -> {to_dim} {to_cut:?} {dtype:?}");
                scope.same(Plain::of(recut, dtype), expected, case);
            }
        }
    }
    Ok(())
}

/// Nobody leaves before all have come: what they did before is seen after.
pub(super) fn barrier(scope: &Scope) -> Result<()> {
    let (size, rank) = (scope.size(), scope.rank());
    for round in 0..10 {
        // What all have sent before the barrier is there after it.
        for to in 0..size {
            scope.comm.send(Call::new("before"), vec![], to, round).wait()?;
        }
        scope.comm.barrier(Call::new("barrier")).wait()?;
        let receives: Vec<_> =
            (0..size).map(|from| scope.comm.receive(Call::new("before"), Some(vec![]), from, round)).collect();
        scope
            .same(receives.iter().all(|receive| receive.is_complete()), true, || format!("round {round}, rank {rank}"));
        for receive in receives {
            receive.wait()?;
        }
    }
    let sums = scope.comm.all_reduce(Call::default(), vec![], ReduceOp::Sum).wait()?;
    scope.same(sums.len(), 0, || "an empty list".into());
    Ok(())
}
