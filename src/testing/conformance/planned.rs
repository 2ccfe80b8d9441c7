//! Plans that are created once and executed several times with different values.

use burn::backend::DispatchTensor;
use burn::tensor::DType;
use itertools::Itertools;

use super::cases::{cases, fits, held, shard_sizes};
use super::plain::PlainTensor;
use super::scope::TestGroup;
use crate::Result;
use crate::comm::{Call, ReduceOp, TensorMeta};
use crate::placement::ShardSizes;

const ROUNDS: usize = 3;

/// A full tensor, its sharded dimension and its shard sizes.
type FullTensor = (TensorMeta, usize, ShardSizes);

/// Returns tensors of all shapes and shard sizes, in all dtypes or in those that `op` supports.
fn full_tensors(scope: &TestGroup, op: Option<ReduceOp>) -> Vec<FullTensor> {
    let fits = |dtype| op.is_none_or(|op| fits(op, dtype, scope));
    let full = |(at, (shape, dim, dtype)): (usize, (Vec<usize>, usize, DType))| {
        let sizes = shard_sizes(shape[dim], scope.size())[at % 2].clone();
        (
            TensorMeta {
                shape: shape.into(),
                dtype,
            },
            dim,
            sizes,
        )
    };
    cases(scope)
        .filter(|(_, _, dtype)| fits(*dtype))
        .enumerate()
        .map(full)
        .collect()
}

/// Returns the values of `rank` in a round.
fn sample((meta, _, _): &FullTensor, round: usize, rank: usize) -> PlainTensor {
    PlainTensor::sample(&meta.shape[..], ROUNDS * rank + round, meta.dtype)
}

fn part(full: &PlainTensor, (_, dim, sizes): &FullTensor, scope: &TestGroup) -> PlainTensor {
    full.narrow(*dim, held(sizes, scope.size(), scope.rank()))
}

pub(super) fn planned(scope: &TestGroup) -> Result<()> {
    let same = |what: &str,
                made: Vec<DispatchTensor>,
                all: &[FullTensor],
                expected: &dyn Fn(&FullTensor) -> PlainTensor| {
        for (made, full) in made.into_iter().zip_eq(all) {
            scope.same(PlainTensor::of(made, full.0.dtype), expected(full), || {
                format!("{what} {full:?}")
            });
        }
    };
    let tensor =
        |plain: PlainTensor, (meta, ..): &FullTensor| plain.tensor(meta.dtype, &scope.device);
    let all = full_tensors(scope, None);
    let summed = full_tensors(scope, Some(ReduceOp::Sum));
    let metas = summed.iter().map(|(meta, ..)| meta.clone()).collect_vec();
    let gather = scope.comm.plan_all_gather(all.clone())?;
    let scatter = scope
        .comm
        .plan_reduce_scatter(summed.clone(), ReduceOp::Sum)?;
    let reduce = scope.comm.plan_all_reduce(&metas, ReduceOp::Sum)?;
    for round in 0..ROUNDS {
        let parts = all
            .iter()
            .map(|full| tensor(part(&sample(full, round, 0), full, scope), full));
        let gathered = scope
            .comm
            .execute_plan(Call::new("gather"), &gather, parts.collect())
            .wait()?;
        same("gather", gathered, &all, &|full| sample(full, round, 0));

        let terms = || {
            summed
                .iter()
                .map(|full| tensor(sample(full, round, scope.rank()), full))
                .collect()
        };
        let sum = |full: &FullTensor| {
            let terms = (0..scope.size())
                .map(|rank| sample(full, round, rank))
                .collect_vec();
            PlainTensor::reduced(&terms, ReduceOp::Sum, full.0.dtype)
        };
        let scattered = scope
            .comm
            .execute_plan(Call::new("scatter"), &scatter, terms())
            .wait()?;
        same("scatter", scattered, &summed, &|full| {
            part(&sum(full), full, scope)
        });
        let reduced = scope
            .comm
            .execute_plan(Call::new("reduce"), &reduce, terms())
            .wait()?;
        same("reduce", reduced, &summed, &sum);
    }
    Ok(())
}
