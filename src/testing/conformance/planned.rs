//! What is planned once and carried out again and again, each time of other values.

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

/// A whole, the dimension in which it is cut, and how.
type FullTensor = (TensorMeta, usize, ShardSizes);

/// Lists of all shapes and cuts: of all dtypes, and of those that `op` takes.
fn full_tensors(scope: &TestGroup, op: Option<ReduceOp>) -> Vec<FullTensor> {
    let fits = |dtype| op.is_none_or(|op| fits(op, dtype, scope));
    let whole = |(at, (shape, dim, dtype)): (usize, (Vec<usize>, usize, DType))| {
        let cut = shard_sizes(shape[dim], scope.size())[at % 2].clone();
        (TensorMeta { shape: shape.into(), dtype }, dim, cut)
    };
    cases(scope).filter(|(_, _, dtype)| fits(*dtype)).enumerate().map(whole).collect()
}

/// What `rank` has in a round.
fn sample((meta, _, _): &FullTensor, round: usize, rank: usize) -> PlainTensor {
    PlainTensor::sample(&meta.shape[..], ROUNDS * rank + round, meta.dtype)
}

fn part(whole: &PlainTensor, (_, dim, cut): &FullTensor, scope: &TestGroup) -> PlainTensor {
    whole.narrow(*dim, held(cut, scope.size(), scope.rank()))
}

pub(super) fn planned(scope: &TestGroup) -> Result<()> {
    let same = |what: &str,
                made: Vec<DispatchTensor>,
                wholes: &[FullTensor],
                expected: &dyn Fn(&FullTensor) -> PlainTensor| {
        for (made, whole) in made.into_iter().zip_eq(wholes) {
            scope.same(PlainTensor::of(made, whole.0.dtype), expected(whole), || format!("{what} {whole:?}"));
        }
    };
    let tensor = |plain: PlainTensor, (meta, ..): &FullTensor| plain.tensor(meta.dtype, &scope.device);
    let (all, summed) = (full_tensors(scope, None), full_tensors(scope, Some(ReduceOp::Sum)));
    let metas = summed.iter().map(|(meta, ..)| meta.clone()).collect_vec();
    let gather = scope.comm.plan_all_gather(all.clone())?;
    let scatter = scope.comm.plan_reduce_scatter(summed.clone(), ReduceOp::Sum)?;
    let reduce = scope.comm.plan_all_reduce(&metas, ReduceOp::Sum)?;
    for round in 0..ROUNDS {
        let parts = all.iter().map(|whole| tensor(part(&sample(whole, round, 0), whole, scope), whole));
        let gathered = scope.comm.execute_plan(Call::new("gather"), &gather, parts.collect()).wait()?;
        same("gather", gathered, &all, &|whole| sample(whole, round, 0));

        let terms = || summed.iter().map(|whole| tensor(sample(whole, round, scope.rank()), whole)).collect();
        let sum = |whole: &FullTensor| {
            let terms = (0..scope.size()).map(|rank| sample(whole, round, rank)).collect_vec();
            PlainTensor::reduced(&terms, ReduceOp::Sum, whole.0.dtype)
        };
        let scattered = scope.comm.execute_plan(Call::new("scatter"), &scatter, terms()).wait()?;
        same("scatter", scattered, &summed, &|whole| part(&sum(whole), whole, scope));
        let reduced = scope.comm.execute_plan(Call::new("reduce"), &reduce, terms()).wait()?;
        same("reduce", reduced, &summed, &sum);
    }
    Ok(())
}
