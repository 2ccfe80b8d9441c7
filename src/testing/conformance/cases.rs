//! Inputs with which every collective is tried: shapes, dtypes and shard sizes.

use std::ops::Range;

use burn::tensor::{BoolStore, DType};

use super::plain::PlainTensor;
use super::scope::TestGroup;
use crate::comm::{ReduceOp, ShardedTensor};
use crate::placement::ShardSizes;

const DTYPES: [DType; 13] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
    DType::Bool(BoolStore::Native),
];

/// Number of elements of a tensor on which all reductions are tried even with few cases.
const TINY: usize = 16;

/// Returns the reductions to try on tensors of `shape`. All results are integers if the operands
/// are. With few cases there are two of them, except for tensors with a few elements on a few
/// ranks.
pub(super) fn ops(scope: &TestGroup, shape: &[usize]) -> Vec<ReduceOp> {
    let is_tiny = shape.iter().product::<usize>() <= TINY && !scope.is_large();
    if scope.has_few() && !is_tiny {
        return vec![ReduceOp::Sum, ReduceOp::Max];
    }
    vec![
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
        ReduceOp::premul_sum(2.0),
    ]
}

/// Returns true if `dtype` supports `op` and the result is exact on this number of ranks.
pub(super) fn fits(op: ReduceOp, dtype: DType, scope: &TestGroup) -> bool {
    match op {
        ReduceOp::Sum => !dtype.is_bool() && scope.sums_are_exact(dtype),
        // The averages of floats are not integers. `bits` checks them.
        ReduceOp::Avg => !dtype.is_bool() && !dtype.is_float(),
        ReduceOp::Min | ReduceOp::Max => true,
        // The values are at most 4.
        ReduceOp::Product if matches!(dtype, DType::I8 | DType::U8) => scope.size() <= 3,
        ReduceOp::Product => scope.size() <= 4 || dtype.is_bool(),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => !dtype.is_float(),
        ReduceOp::PremulSum(_) => dtype.is_float() && scope.size() <= 16,
    }
}

/// Returns a chunk of size `len / parts`, rounded up. The last chunks may be smaller or empty, as
/// in `torch.chunk`.
fn chunk(len: usize, parts: usize, index: usize) -> Range<usize> {
    let size = len.div_ceil(parts);
    (index * size).min(len)..((index + 1) * size).min(len)
}

/// Returns the shardings of a dimension that are tried: chunks, and uneven sizes where the first of
/// several ranks is empty and the last has most elements.
pub(super) fn shard_sizes(len: usize, ranks: usize) -> [ShardSizes; 2] {
    let mut lengths: Vec<usize> = (0..ranks)
        .map(|rank| usize::from(rank > 0 && rank <= len))
        .collect();
    lengths[ranks - 1] += len - lengths.iter().sum::<usize>();
    [ShardSizes::Chunked(len), ShardSizes::Uneven(lengths.into())]
}

/// Returns the range of elements that a rank holds, by the definition of the sharding.
pub(super) fn held(sizes: &ShardSizes, parts: usize, index: usize) -> Range<usize> {
    match sizes {
        ShardSizes::Chunked(len) => chunk(*len, parts, index),
        ShardSizes::Uneven(lengths) => {
            let before = lengths.iter().take(index).sum::<usize>();
            before..before + lengths[index]
        }
    }
}

/// Returns the dtypes to try: all, or with few cases one of each kind.
pub(super) fn dtypes(scope: &TestGroup) -> Vec<DType> {
    let some = [
        DType::F32,
        DType::BF16,
        DType::I64,
        DType::Bool(BoolStore::Native),
    ];
    if scope.has_few() {
        some.into()
    } else {
        DTYPES.into()
    }
}

/// Returns the shapes to try, which have even, uneven and empty chunks in groups of up to 8. With
/// few cases there are fewer shapes. If long tensors are requested, there are longer ones.
pub(super) fn shapes(scope: &TestGroup) -> Vec<Vec<usize>> {
    if scope.is_long() {
        return vec![vec![4001], vec![70, 61]];
    }
    if scope.has_few() {
        return vec![vec![300], vec![5, 3], vec![2, 130]];
    }
    vec![
        vec![17],
        vec![1],
        vec![8, 6],
        vec![5, 3],
        vec![2, 70],
        vec![0, 3],
        vec![3, 4, 5],
        vec![4, 2, 9],
    ]
}

/// Returns every case: shape, sharded dimension and dtype.
pub(super) fn cases(scope: &TestGroup) -> impl Iterator<Item = (Vec<usize>, usize, DType)> {
    let dtypes = dtypes(scope);
    shapes(scope).into_iter().flat_map(move |shape| {
        let dtypes = dtypes.clone();
        (0..shape.len()).flat_map(move |dim| {
            let shape = shape.clone();
            dtypes
                .clone()
                .into_iter()
                .map(move |dtype| (shape.clone(), dim, dtype))
        })
    })
}

/// Returns this rank's shard of `full`.
pub(super) fn shard(
    full: &PlainTensor,
    dim: usize,
    sizes: ShardSizes,
    dtype: DType,
    scope: &TestGroup,
) -> ShardedTensor {
    let range = held(&sizes, scope.size(), scope.rank());
    ShardedTensor {
        tensor: full.narrow(dim, range).tensor(dtype, &scope.device),
        dim,
        sizes,
    }
}
