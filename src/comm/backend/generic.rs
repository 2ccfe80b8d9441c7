//! Copies and reductions by burn's tensor operations, for tensors of any backend.
//!
//! The tensors of other ranks are moved to the rank's device first, so the ranks may use different
//! devices.

use std::ops::Range;

use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::kind::{Basic, Ordered};
use burn::tensor::{Bool, DType, Device, Float, Int, Shape, Slice, Tensor, TensorData};

use super::ranges::Ranges;
use crate::comm::ReduceOp;
use crate::memory;

/// Maximum number of dimensions of a tensor, as [`with_rank`] lists them.
pub(crate) const MAX_DIMS: usize = 8;

/// Evaluates `$body` with the constant `$d` set to `$rank`.
macro_rules! with_rank {
    ($rank:expr, $d:ident => $body:expr) => {
        with_rank!(@each $rank, $d => $body; 1 2 3 4 5 6 7 8)
    };
    (@each $rank:expr, $d:ident => $body:expr; $($literal:literal)*) => {
        match $rank {
            $($literal => { const $d: usize = $literal; $body })*
            rank => panic!("collectives on this backend support tensors of 1 to {MAX_DIMS} dimensions, not {rank}"),
        }
    };
}

/// Evaluates `$body` with the constant `$d` set to `$rank` and the type `$k` to the kind of
/// `$dtype`.
macro_rules! with_rank_and_kind {
    ($rank:expr, $dtype:expr, $d:ident, $k:ident => $body:expr) => {
        match $dtype {
            dtype if dtype.is_float() => {
                type $k = Float;
                with_rank!($rank, $d => $body)
            }
            dtype if dtype.is_bool() => {
                type $k = Bool;
                with_rank!($rank, $d => $body)
            }
            _ => {
                type $k = Int;
                with_rank!($rank, $d => $body)
            }
        }
    };
}

/// Concatenates the blocks of `sources` along `dim`, on `device`.
pub(crate) fn concat(
    sources: &[(&DispatchTensor, Ranges)],
    dim: usize,
    device: &Device,
) -> DispatchTensor {
    let first = sources[0].0;
    with_rank_and_kind!(first.shape().num_dims(), first.dtype(), D, K => concat_typed::<D, K>(sources, dim, device))
}

/// Reduces the block `ranges` of every source over the sources, in a fixed binary tree, on
/// `device`.
pub(crate) fn reduce(
    sources: &[&DispatchTensor],
    ranges: &Ranges,
    op: ReduceOp,
    device: &Device,
) -> DispatchTensor {
    if ranges.iter().any(|range| range.is_empty()) {
        return concat(&[(sources[0], ranges.clone())], 0, device);
    }
    let rank = sources[0].shape().num_dims();
    let dtype = sources[0].dtype();
    if dtype.is_float() {
        with_rank!(rank, D => reduce_float::<D>(blocks(sources, ranges, device), dtype, op).into_dispatch())
    } else if dtype.is_bool() {
        with_rank!(rank, D => reduce_bool::<D>(blocks(sources, ranges, device), op).into_dispatch())
    } else {
        with_rank!(rank, D => reduce_int::<D>(blocks(sources, ranges, device), dtype, op).into_dispatch())
    }
}

/// Returns rows `range` of a tensor: a view, if the backend has views.
pub(crate) fn rows(tensor: &DispatchTensor, range: Range<usize>) -> DispatchTensor {
    with_rank_and_kind!(tensor.shape().num_dims(), tensor.dtype(), D, K => {
        Tensor::<D, K>::from_dispatch(tensor.clone()).slice_dim(0, range).into_dispatch()
    })
}

/// Returns the elements of a tensor, on the host.
pub(crate) fn into_data(tensor: DispatchTensor) -> TensorData {
    with_rank_and_kind!(tensor.shape().num_dims(), tensor.dtype(), D, K => {
        Tensor::<D, K>::from_dispatch(tensor).into_data()
    })
}

/// Creates a tensor of these elements on `device`.
pub(crate) fn from_data(data: TensorData, device: &Device) -> DispatchTensor {
    let dtype = data.dtype();
    if dtype.is_float() {
        Dispatch::float_from_data(data, device.as_dispatch())
    } else if dtype.is_bool() {
        Dispatch::bool_from_data(data, device.as_dispatch())
    } else {
        Dispatch::int_from_data(data, device.as_dispatch())
    }
}

/// Returns a tensor with the same elements in another shape.
pub(crate) fn reshaped(tensor: DispatchTensor, shape: Shape) -> DispatchTensor {
    let dtype = tensor.dtype();
    if dtype.is_float() {
        Dispatch::float_reshape(tensor, shape)
    } else if dtype.is_bool() {
        Dispatch::bool_reshape(tensor, shape)
    } else {
        Dispatch::int_reshape(tensor, shape)
    }
}

fn concat_typed<const D: usize, K: Basic>(
    sources: &[(&DispatchTensor, Ranges)],
    dim: usize,
    device: &Device,
) -> DispatchTensor {
    let block =
        |(tensor, ranges): &(&DispatchTensor, Ranges)| block::<D, K>(tensor, ranges, device);
    // An empty block adds nothing, and not every backend can concatenate one.
    let mut blocks: Vec<_> = sources
        .iter()
        .filter(|(_, ranges)| !ranges[dim].is_empty())
        .map(block)
        .collect();
    if blocks.is_empty() {
        blocks.push(block(&sources[0]));
    }
    // burn returns a single block unchanged, which would be another rank's memory.
    match <[_; 1]>::try_from(blocks) {
        Ok([block]) => memory::assigned(block.into_dispatch()),
        Err(blocks) => Tensor::cat(blocks, dim).into_dispatch(),
    }
}

fn blocks<const D: usize, K: Basic>(
    sources: &[&DispatchTensor],
    ranges: &Ranges,
    device: &Device,
) -> Vec<Tensor<D, K>> {
    sources
        .iter()
        .map(|tensor| block(tensor, ranges, device))
        .collect()
}

fn block<const D: usize, K: Basic>(
    tensor: &DispatchTensor,
    ranges: &Ranges,
    device: &Device,
) -> Tensor<D, K> {
    let slices: Vec<Slice> = ranges
        .iter()
        .map(|range| Slice::from(range.clone()))
        .collect();
    Tensor::<D, K>::from_dispatch(tensor.clone())
        .slice(&slices)
        .to_device(device)
}

/// Reduces float blocks. f16 and bf16 are summed in f32 and rounded once.
fn reduce_float<const D: usize>(blocks: Vec<Tensor<D>>, dtype: DType, op: ReduceOp) -> Tensor<D> {
    if matches!(dtype, DType::F16 | DType::BF16) {
        let blocks = blocks
            .into_iter()
            .map(|block| block.cast(DType::F32))
            .collect();
        return reduce_float(blocks, DType::F32, op).cast(dtype);
    }
    if let ReduceOp::PremulSum(factor) = op {
        let terms = blocks
            .into_iter()
            .map(|block| block.mul_scalar(factor.value()))
            .collect();
        return reduce_numeric(terms, ReduceOp::Sum);
    }
    match op {
        ReduceOp::Min => tree(blocks, |left, right| {
            let is_less = left.clone().lower(right.clone());
            select(left, right, is_less)
        }),
        ReduceOp::Max => tree(blocks, |left, right| {
            let is_greater = left.clone().greater(right.clone());
            select(left, right, is_greater)
        }),
        _ => reduce_numeric(blocks, op),
    }
}

/// Returns `left` where it is `better` than `right` or NaN, and otherwise `right`. No comparison
/// with NaN is true, so the result is NaN if either is; burn's `min_pair` and `max_pair` drop a NaN
/// on the right.
fn select<const D: usize>(left: Tensor<D>, right: Tensor<D>, better: Tensor<D, Bool>) -> Tensor<D> {
    let is_left = better.bool_or(left.clone().is_nan());
    right.mask_where(is_left, left)
}

/// Reduces integer blocks. Narrow integers are averaged in 64 bits, where their sum does not
/// overflow.
fn reduce_int<const D: usize>(
    blocks: Vec<Tensor<D, Int>>,
    dtype: DType,
    op: ReduceOp,
) -> Tensor<D, Int> {
    if op == ReduceOp::Avg && dtype.size() < 8 {
        let blocks = blocks
            .into_iter()
            .map(|block| block.cast(DType::I64))
            .collect();
        return reduce_numeric(blocks, op).cast(dtype);
    }
    match op {
        ReduceOp::BitAnd => tree(blocks, Tensor::bitwise_and),
        ReduceOp::BitOr => tree(blocks, Tensor::bitwise_or),
        ReduceOp::BitXor => tree(blocks, Tensor::bitwise_xor),
        _ => reduce_numeric(blocks, op),
    }
}

/// Reduces bool blocks, where minimum and product are `and`, and maximum is `or`.
fn reduce_bool<const D: usize>(blocks: Vec<Tensor<D, Bool>>, op: ReduceOp) -> Tensor<D, Bool> {
    match op {
        ReduceOp::Max | ReduceOp::BitOr => tree(blocks, Tensor::bool_or),
        ReduceOp::BitXor => tree(blocks, Tensor::bool_xor),
        _ => tree(blocks, Tensor::bool_and),
    }
}

fn reduce_numeric<const D: usize, K: Ordered>(
    blocks: Vec<Tensor<D, K>>,
    op: ReduceOp,
) -> Tensor<D, K> {
    let count = blocks.len() as i64;
    match op {
        ReduceOp::Sum => tree(blocks, Tensor::add),
        ReduceOp::Avg => tree(blocks, Tensor::add).div_scalar(count),
        ReduceOp::Min => tree(blocks, Tensor::min_pair),
        ReduceOp::Max => tree(blocks, Tensor::max_pair),
        ReduceOp::Product => tree(blocks, Tensor::mul),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor | ReduceOp::PremulSum(_) => {
            unreachable!(
                "{op:?} of {} is rejected when a collective is posted",
                std::any::type_name::<K>()
            )
        }
    }
}

/// Combines the elements in a binary tree: neighbours first, then neighbouring pairs. An element
/// without a partner moves up one level.
fn tree<T>(mut level: Vec<T>, combine: impl Fn(T, T) -> T) -> T {
    while level.len() > 1 {
        let mut values = level.into_iter();
        let mut above = Vec::with_capacity(values.len().div_ceil(2));
        while let Some(first) = values.next() {
            above.push(match values.next() {
                Some(second) => combine(first, second),
                None => first,
            });
        }
        level = above;
    }
    level.pop().expect("there is at least one source")
}
