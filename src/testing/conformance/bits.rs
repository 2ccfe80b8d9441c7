//! Tests of what reductions do to bits: the order of summation, when sums are rounded, and NaN and
//! infinities.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor, TensorData};

use super::cases::held;
use super::plain::into_data;
use super::scope::TestGroup;
use crate::Result;
use crate::comm::{Call, ReduceOp, ShardedTensor};
use crate::placement::ShardSizes;

/// Number of elements of a tensor, before `TestGroup::length` scales it.
const LEN: usize = 61;

/// Checks sums of values of many magnitudes, whose bits depend on the order of summation, if the
/// backend adds [in the fixed tree](crate::comm::Capabilities::fixed_tree). Also checks averages of integers whose sum overflows the dtype, and NaN and infinities of any rank.
pub(super) fn bits(scope: &TestGroup) -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        if scope.comm.capabilities().fixed_tree {
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::premul_sum(0.3)] {
                sums(scope, dtype, op)?;
            }
        }
        for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Avg] {
            specials(scope, dtype, op)?;
        }
    }
    let greatest = [
        (DType::I8, 127),
        (DType::U8, 255),
        (DType::I16, 32_767),
        (DType::U16, 65_535),
    ];
    greatest
        .into_iter()
        .try_for_each(|(dtype, greatest)| averages(scope, dtype, greatest))
}

fn sums(scope: &TestGroup, dtype: DType, op: ReduceOp) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let len = scope.length(LEN);
    let term = |rank: usize| {
        TensorData::new((0..len).map(|i| value(rank, i)).collect(), [len]).convert_dtype(dtype)
    };
    let terms: Vec<Vec<f64>> = (0..size).map(|rank| term(rank).iter().collect()).collect();
    let reduced = (0..len)
        .map(|i| tree(terms.iter().map(|term| term[i]).collect(), op, dtype))
        .collect();
    let expected: Vec<f64> = TensorData::new(reduced, [len])
        .convert_dtype(dtype)
        .iter()
        .collect();

    let tensor = Tensor::<1>::from_data(term(rank), (&scope.device, dtype));
    let sizes = ShardSizes::Chunked(len);
    let part = expected[held(&sizes, size, rank)].to_vec();
    let full = scope
        .comm
        .all_reduce(Call::default(), vec![tensor.clone().into_dispatch()], op)
        .wait()?
        .remove(0);
    scope.same(into_data(full).iter().collect(), expected, || {
        format!("all_reduce, {dtype:?} {op:?}")
    });
    let shard = ShardedTensor {
        tensor: tensor.into_dispatch(),
        dim: 0,
        sizes,
    };
    let own = scope
        .comm
        .reduce_scatter(Call::default(), vec![shard], op)
        .wait()?
        .remove(0);
    scope.same(into_data(own).iter().collect(), part, || {
        format!("reduce_scatter, {dtype:?} {op:?}")
    });
    Ok(())
}

/// Returns thirds of powers of two, of either sign.
fn value(rank: usize, i: usize) -> f64 {
    let sign = if (rank + i).is_multiple_of(3) {
        -1.0
    } else {
        1.0
    };
    sign * f64::from(1_u32 << ((i * 7 + rank * 5) % 8)) / 3.0
}

/// Computes the expected reduction as a binary tree in which neighbours are added first. It rounds
/// to `f32`, or to `f64` if `dtype` is that. Computing in 64 bits and rounding after each operation
/// gives exactly that result.
fn tree(terms: Vec<f64>, op: ReduceOp, dtype: DType) -> f64 {
    let round = |value: f64| {
        if dtype == DType::F64 {
            value
        } else {
            f64::from(value as f32)
        }
    };
    let count = terms.len();
    let mut level = terms;
    if let ReduceOp::PremulSum(factor) = op {
        level
            .iter_mut()
            .for_each(|term| *term = round(round(factor.value()) * *term));
    }
    while level.len() > 1 {
        level = level
            .chunks(2)
            .map(|pair| round(pair.iter().sum()))
            .collect();
    }
    if op == ReduceOp::Avg {
        round(level[0] / count as f64)
    } else {
        level[0]
    }
}

/// Checks that a result is NaN if any rank has NaN, and that infinities are values like others.
fn specials(scope: &TestGroup, dtype: DType, op: ReduceOp) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let len = SPECIALS * size;
    let term =
        |rank: usize| TensorData::new((0..len).map(|i| special(rank, size, i)).collect(), [len]);
    let expected: Vec<_> = (0..len)
        .map(|i| limit((0..size).map(|rank| special(rank, size, i)).collect(), op))
        .collect();
    let known = |tensor: DispatchTensor| -> Vec<Option<f64>> {
        into_data(tensor)
            .iter::<f64>()
            .map(|value| Some(value).filter(|value| !value.is_nan()))
            .collect()
    };

    let tensor = Tensor::<1>::from_data(term(rank).convert_dtype(dtype), (&scope.device, dtype))
        .into_dispatch();
    let sizes = ShardSizes::Chunked(len);
    let part = expected[held(&sizes, size, rank)].to_vec();
    let full = scope
        .comm
        .all_reduce(Call::default(), vec![tensor.clone()], op)
        .wait()?
        .remove(0);
    scope.same(known(full), expected, || {
        format!("all_reduce, NaN and infinities of {dtype:?} {op:?}")
    });
    let shard = ShardedTensor {
        tensor,
        dim: 0,
        sizes,
    };
    let own = scope
        .comm
        .reduce_scatter(Call::default(), vec![shard], op)
        .wait()?
        .remove(0);
    scope.same(known(own), part, || {
        format!("reduce_scatter, NaN and infinities of {dtype:?} {op:?}")
    });
    Ok(())
}

/// Number of patterns of [`special`].
const SPECIALS: usize = 5;

/// Returns element `i` of a rank. Each rank in turn has NaN, an infinity of either sign, NaN next
/// to a rank with an infinity, or an infinity next to a rank with the other. All other ranks have
/// small integers.
fn special(rank: usize, size: usize, i: usize) -> f64 {
    let first = i % size;
    let second = (i + 1) % size;
    match i / size {
        0 | 3 if rank == first => f64::NAN,
        1 | 4 if rank == first => f64::INFINITY,
        2 if rank == first => f64::NEG_INFINITY,
        3 if rank == second => f64::INFINITY,
        4 if rank == second => f64::NEG_INFINITY,
        _ => ((rank + i) % 5) as f64 - 2.0,
    }
}

/// Computes the expected reduction of values of [`special`], by the definition of each; `None` is
/// NaN.
fn limit(terms: Vec<f64>, op: ReduceOp) -> Option<f64> {
    let has = |value: f64| terms.contains(&value);
    if terms.iter().any(|term| term.is_nan()) {
        return None;
    }
    match op {
        ReduceOp::Min => terms.iter().copied().reduce(f64::min),
        ReduceOp::Max => terms.iter().copied().reduce(f64::max),
        // Each sum has an infinity.
        _ if has(f64::INFINITY) && has(f64::NEG_INFINITY) => None,
        _ => Some(if has(f64::INFINITY) {
            f64::INFINITY
        } else {
            f64::NEG_INFINITY
        }),
    }
}

fn averages(scope: &TestGroup, dtype: DType, greatest: i64) -> Result<()> {
    let value = |rank: usize| greatest - rank as i64 % 3;
    let data = TensorData::new(vec![value(scope.rank()); 3], [3]).convert_dtype(dtype);
    let tensor = Tensor::<1, Int>::from_data(data, (&scope.device, dtype)).into_dispatch();
    let average = scope
        .comm
        .all_reduce(Call::default(), vec![tensor.clone()], ReduceOp::Avg)
        .wait()?
        .remove(0);
    let expected = (0..scope.size()).map(value).sum::<i64>() / scope.size() as i64;
    scope.same(
        into_data(average).iter().collect(),
        vec![expected; 3],
        || format!("all_reduce, average of {dtype:?}"),
    );
    let shard = ShardedTensor {
        tensor,
        dim: 0,
        sizes: ShardSizes::Chunked(3),
    };
    let own = scope
        .comm
        .reduce_scatter(Call::default(), vec![shard], ReduceOp::Avg)
        .wait()?
        .remove(0);
    let own: Vec<i64> = into_data(own).iter().collect();
    let count = own.len();
    scope.same(own, vec![expected; count], || {
        format!("reduce_scatter, average of {dtype:?}")
    });
    Ok(())
}
