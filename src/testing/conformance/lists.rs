//! Collectives with tensors of any shape, one from each rank or one for each rank.

use std::collections::BTreeMap;

use burn::tensor::{DType, Float, Int, Tensor, TensorData};

use super::cases::{dtypes, fits, ops};
use super::plain::PlainTensor;
use super::scope::TestGroup;
use crate::Result;
use crate::comm::Call;

/// Checks that every rank gets every tensor.
pub(super) fn all_gather_list(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    for dtype in dtypes(scope) {
        for shape in [vec![5], vec![3, 0], vec![2, 3, 2]] {
            let of = |rank: usize| {
                let mut shape = shape.clone();
                shape[0] = scope.length(shape[0] + rank % 3);
                PlainTensor::sample(&shape, rank, dtype)
            };
            let all: Vec<_> = (0..size).map(of).collect();
            let metas = all.iter().map(|plain| plain.meta(dtype)).collect();
            let tensor = all[scope.rank()].tensor(dtype, &scope.device);
            let got = scope
                .comm
                .all_gather_list(Call::default(), tensor, metas)
                .wait()?;
            let got: Vec<_> = got
                .into_iter()
                .map(|one| PlainTensor::of(one, dtype))
                .collect();
            scope.same(got, all, || format!("{shape:?} {dtype:?}"));
        }
    }
    Ok(())
}

/// Checks that rank `i` gets the reduction of tensor `i`. The tensors for different ranks have
/// different lengths.
pub(super) fn reduce_scatter_list(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    for dtype in dtypes(scope) {
        for op in ops(scope, &[scope.length(3), 4])
            .into_iter()
            .filter(|op| fits(*op, dtype, scope))
        {
            let part = |from: usize, to: usize| {
                PlainTensor::sample(&[scope.length(1 + to % 3), 4], from * size + to, dtype)
            };
            let parts = (0..size)
                .map(|to| part(rank, to).tensor(dtype, &scope.device))
                .collect();
            let got = scope
                .comm
                .reduce_scatter_list(Call::default(), parts, op)
                .wait()?;
            let terms: Vec<_> = (0..size).map(|from| part(from, rank)).collect();
            scope.same(
                PlainTensor::of(got, dtype),
                PlainTensor::reduced(&terms, op, dtype),
                || format!("{dtype:?} {op:?}"),
            );
        }
    }
    Ok(())
}

/// Checks that every rank gets from each rank the tensor for it, or none.
pub(super) fn all_to_all_list(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    for dtype in dtypes(scope) {
        // The number of rows depends on the pair and may be 0. For some pairs there is no tensor.
        let part = |from: usize, to: usize| {
            let rows = scope.length((from + 2 * to) % 4);
            let shape = if (from + to).is_multiple_of(2) {
                vec![rows, 3]
            } else {
                vec![rows]
            };
            ((from * to + from) % 3 < 2)
                .then(|| PlainTensor::sample(&shape, from * size + to, dtype))
        };
        let parts =
            (0..size).map(|to| part(rank, to).map(|part| part.tensor(dtype, &scope.device)));
        let metas = (0..size).map(|from| part(from, rank).map(|part| part.meta(dtype)));
        let got = scope
            .comm
            .all_to_all_list(Call::default(), parts.collect(), metas.collect())
            .wait()?;
        let got: Vec<_> = got
            .into_iter()
            .map(|part| part.map(|part| PlainTensor::of(part, dtype)))
            .collect();
        scope.same(
            got,
            (0..size).map(|from| part(from, rank)).collect(),
            || format!("{dtype:?}"),
        );
    }
    Ok(())
}

/// Checks that rows are sent according to the splits, equal or not, and that `exchange_splits`
/// gives the receivers their numbers of rows.
pub(super) fn all_to_all_single(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let splits: [fn(usize, usize) -> usize; 3] = [
        |_, _| 2,
        |from, to| (from + 2 * to) % 4,
        |from, to| from.min(to).min(8),
    ];
    for (which, split) in splits.into_iter().enumerate() {
        let split = |from, to| scope.length(split(from, to));
        for dtype in dtypes(scope) {
            let given: Vec<_> = (0..size).map(|to| split(rank, to)).collect();
            let taken: Vec<_> = (0..size).map(|from| split(from, rank)).collect();
            scope.same(
                scope.comm.exchange_splits(Call::default(), &given).wait()?,
                taken.clone(),
                || "splits".into(),
            );
            let rows_of = |from: usize| {
                PlainTensor::sample(&[(0..size).map(|to| split(from, to)).sum(), 3], from, dtype)
            };
            let tensor = rows_of(rank).tensor(dtype, &scope.device);
            let got = scope
                .comm
                .all_to_all_single(Call::default(), tensor, &given, &taken)
                .wait()?;
            let mut expected = PlainTensor {
                shape: vec![taken.iter().sum(), 3],
                values: Vec::new(),
            };
            for from in 0..size {
                let start = (0..rank).map(|to| split(from, to)).sum::<usize>();
                expected.values.extend(
                    rows_of(from)
                        .narrow(0, start..start + split(from, rank))
                        .values,
                );
            }
            scope.same(PlainTensor::of(got, dtype), expected, || {
                format!("splits {which}, {dtype:?}")
            });
        }
    }
    Ok(())
}

/// Checks the reduction of indexed rows: the union of the indices, and the sums of the rows.
pub(super) fn sparse(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let device = &scope.device;
    for dtype in [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I64,
        DType::I32,
    ] {
        for count in [0, 1, 5] {
            // The number of rows differs between ranks, and indices repeat.
            let count = |rank: usize| scope.length((count + rank) % 6);
            let index = |rank: usize, row: usize| ((7 * row + 3 * rank) % scope.length(11)) as i64;
            let value =
                |rank: usize, row: usize, column: usize| ((rank + 2 * row + column) % 3) as i64;
            let mut sums: BTreeMap<i64, [i64; 2]> = BTreeMap::new();
            for (rank, row) in
                (0..size).flat_map(|rank| (0..count(rank)).map(move |row| (rank, row)))
            {
                let sum = sums.entry(index(rank, row)).or_default();
                (0..2).for_each(|column| sum[column] += value(rank, row, column));
            }
            let (rank, rows) = (scope.rank(), count(scope.rank()));
            let indices: Vec<_> = (0..rows).map(|row| index(rank, row)).collect();
            let values: Vec<_> = (0..2 * rows)
                .map(|at| value(rank, at / 2, at % 2))
                .collect();
            let indices = Tensor::<1, Int>::from_data(TensorData::new(indices, [rows]), device);
            let values = TensorData::new(values, [rows, 2]).convert_dtype(dtype);
            let call = || Call::new("rows");
            let (indices, values) = if dtype.is_float() {
                let values = Tensor::<2, Float>::from_data(values, (device, dtype));
                let (indices, sums) = scope.comm.all_reduce_sparse(call(), indices, values)?;
                (indices, sums.into_dispatch())
            } else {
                let values = Tensor::<2, Int>::from_data(values, (device, dtype));
                let (indices, sums) = scope.comm.all_reduce_sparse(call(), indices, values)?;
                (indices, sums.into_dispatch())
            };
            let indices: Vec<i64> = indices.into_data().iter::<i64>().collect();
            scope.same(indices, sums.keys().copied().collect(), || {
                format!("indices, {dtype:?}")
            });
            let expected = PlainTensor {
                shape: vec![sums.len(), 2],
                values: sums.into_values().flatten().collect(),
            };
            scope.same(PlainTensor::of(values, dtype), expected, || {
                format!("sums, {dtype:?}")
            });
        }
    }
    Ok(())
}
