//! What every collective is tried on: shapes, dtypes, and the cuts of a length.

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

/// Elements of a tensor on which everything is tried.
const TINY: usize = 16;

/// Reductions whose results are integers where the terms are, for tensors of `shape`; of few cases two, but for tensors of
/// a few elements on a few ranks, on which all are tried.
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

/// Whether `op` is one of `dtype`, and exact on so many ranks.
pub(super) fn fits(op: ReduceOp, dtype: DType, scope: &TestGroup) -> bool {
    match op {
        ReduceOp::Sum => !dtype.is_bool() && scope.sums_are_exact(dtype),
        // The averages of floats are no integers; held to others elsewhere.
        ReduceOp::Avg => !dtype.is_bool() && !dtype.is_float(),
        ReduceOp::Min | ReduceOp::Max => true,
        // Factors are at most 4.
        ReduceOp::Product if matches!(dtype, DType::I8 | DType::U8) => scope.size() <= 3,
        ReduceOp::Product => scope.size() <= 4 || dtype.is_bool(),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => !dtype.is_float(),
        ReduceOp::PremulSum(_) => dtype.is_float() && scope.size() <= 16,
    }
}

/// Ceil-sized chunks, the tail ones possibly empty: `torch.chunk`.
fn chunk(len: usize, parts: usize, index: usize) -> Range<usize> {
    let size = len.div_ceil(parts);
    (index * size).min(len)..((index + 1) * size).min(len)
}

/// The cuts of a length that are tried: into chunks, and ragged, with nothing on the first of several
/// ranks and most on the last.
pub(super) fn shard_sizes(len: usize, ranks: usize) -> [ShardSizes; 2] {
    let mut lengths: Vec<usize> = (0..ranks).map(|rank| usize::from(rank > 0 && rank <= len)).collect();
    lengths[ranks - 1] += len - lengths.iter().sum::<usize>();
    [ShardSizes::Chunked(len), ShardSizes::Uneven(lengths.into())]
}

/// What a rank holds, by the definition.
pub(super) fn held(sizes: &ShardSizes, parts: usize, index: usize) -> Range<usize> {
    match sizes {
        ShardSizes::Chunked(len) => chunk(*len, parts, index),
        ShardSizes::Uneven(lengths) => {
            let before = lengths.iter().take(index).sum::<usize>();
            before..before + lengths[index]
        }
    }
}

/// The dtypes that are tried: all, of few cases one of each kind.
pub(super) fn dtypes(scope: &TestGroup) -> Vec<DType> {
    let some = [DType::F32, DType::BF16, DType::I64, DType::Bool(BoolStore::Native)];
    if scope.has_few() { some.into() } else { DTYPES.into() }
}

/// Shapes with even, uneven and empty chunks for groups of up to 8; of few cases fewer, and longer ones, as if asked for those.
pub(super) fn shapes(scope: &TestGroup) -> Vec<Vec<usize>> {
    if scope.is_long() {
        return vec![vec![4001], vec![70, 61]];
    }
    if scope.has_few() {
        return vec![vec![300], vec![5, 3], vec![2, 130]];
    }
    vec![vec![17], vec![1], vec![8, 6], vec![5, 3], vec![2, 70], vec![0, 3], vec![3, 4, 5], vec![4, 2, 9]]
}

/// Every case: shape, cut dimension and dtype.
pub(super) fn cases(scope: &TestGroup) -> impl Iterator<Item = (Vec<usize>, usize, DType)> {
    let dtypes = dtypes(scope);
    shapes(scope).into_iter().flat_map(move |shape| {
        let dtypes = dtypes.clone();
        (0..shape.len()).flat_map(move |dim| {
            let shape = shape.clone();
            dtypes.clone().into_iter().map(move |dtype| (shape.clone(), dim, dtype))
        })
    })
}

/// This rank's piece of `whole`.
pub(super) fn shard(
    full: &PlainTensor,
    dim: usize,
    sizes: ShardSizes,
    dtype: DType,
    scope: &TestGroup,
) -> ShardedTensor {
    let range = held(&sizes, scope.size(), scope.rank());
    ShardedTensor { tensor: full.narrow(dim, range).tensor(dtype, &scope.device), dim, sizes }
}
