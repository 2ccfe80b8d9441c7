//! Lookups in a dimension that is sharded: each rank answers for the rows it holds, zeros for the
//! others, and the sum over the ranks is the answer.
//!
//! ```text
//! indices [4, 0, 7, 2]                       rank 0: rows 0..4          rank 1: rows 4..8
//! local indices, 0 for what is elsewhere     [0, 0, 0, 2]               [0, 0, 3, 0]
//! looked up, zeros for what is elsewhere     [0, x0, 0, x2]             [x4, 0, x7, 0]
//! ```
//!
//! No row is moved, and no rank needs to know what the others hold. Updates go the other way: an
//! extra row takes what is elsewhere, and is dropped.
//!
//! An index that no rank holds is none on any rank: it stays out of bounds, and burn's operator says
//! what becomes of it, as on a tensor that is not cut (Flex refuses it).

use std::ops::Range;

use burn::tensor::{Bool, DType, Int, IntDType, Shape, Tensor};

use super::Operator;
use crate::dtensor::Kind;

/// Whether dimension `dim` of input `at` is cut: then where.
pub(super) fn part(op: &Operator, at: usize, dim: usize) -> Option<Range<usize>> {
    let range = op.input_range(at, dim);
    (range.len() < op.input_spec(at).shape()[dim]).then_some(range)
}

/// Looks `indices` up in `x`, this rank's part `range` of the rows of dimension `dim`.
pub(super) fn look_up<const D: usize, const I: usize, const O: usize, K: Kind>(
    x: Tensor<D, K>,
    dim: usize,
    indices: Tensor<I, Int>,
    range: &Range<usize>,
    op: &Operator,
    spread: impl FnOnce(Tensor<I, Bool>) -> Tensor<O, Bool>,
    local: impl FnOnce(Tensor<D, K>, Tensor<I, Int>) -> Tensor<O, K>,
) -> Tensor<O, K> {
    let (indices, elsewhere) = localize(indices, range, op.input_spec(0).shape()[dim], 0);
    let shape: Shape = op.output_shape(0).clone();
    local(x, indices).mask_fill(spread(elsewhere).expand(shape), 0)
}

/// `found`, of the element type of what it was found in: burn-flex 0.22 finds booleans as bytes.
pub(super) fn of_type<const D: usize, K: Kind>(found: Tensor<D, K>, dtype: DType) -> Tensor<D, K> {
    if found.dtype() == dtype {
        return found;
    }
    let device = found.device();
    Tensor::from_data(found.into_data().convert_dtype(dtype), (&device, dtype))
}

/// Updates `x`, this rank's part `range` of the rows of dimension `dim`, where `indices` say.
pub(super) fn update<const D: usize, const I: usize, K: Kind>(
    x: Tensor<D, K>,
    dim: usize,
    indices: Tensor<I, Int>,
    range: &Range<usize>,
    op: &Operator,
    local: impl FnOnce(Tensor<D, K>, Tensor<I, Int>) -> Tensor<D, K>,
) -> Tensor<D, K> {
    let (indices, _) = localize(indices, range, op.input_spec(0).shape()[dim], range.len());
    local(with_extra_row(x, dim), indices).slice_dim(dim, 0..range.len())
}

/// `x` and one more row of dimension `dim`, for what is elsewhere.
pub(super) fn with_extra_row<const D: usize, K: Kind>(x: Tensor<D, K>, dim: usize) -> Tensor<D, K> {
    let mut extra = x.dims();
    extra[dim] = 1;
    let extra = Tensor::zeros(extra, (&x.device(), x.dtype()));
    Tensor::cat(vec![x, extra], dim)
}

/// `indices` of `len` rows, as places in this rank's part `range` of them: `other` for those that
/// are elsewhere, and which these are; out of bounds where no rank has them.
pub(super) fn localize<const I: usize>(
    indices: Tensor<I, Int>,
    range: &Range<usize>,
    len: usize,
    other: usize,
) -> (Tensor<I, Int>, Tensor<I, Bool>) {
    let indices = holding(indices, len);
    let (elsewhere, nowhere) = (outside(&indices, range), outside(&indices, &(0..len)));
    let local = moved(indices, &elsewhere, range.start, other);
    (local.mask_fill(nowhere, len as i64), elsewhere)
}

/// `indices` counted from `start`, and `other` for those `elsewhere`: unsigned ones go no lower than 0.
pub(super) fn moved<const I: usize>(
    indices: Tensor<I, Int>,
    elsewhere: &Tensor<I, Bool>,
    start: usize,
    other: usize,
) -> Tensor<I, Int> {
    indices.mask_fill(elsewhere.clone(), (start + other) as i64).sub_scalar(start as i64)
}

/// `indices` in a type that holds every index of `len` rows and what is outside: narrow ones would
/// take a bound for another number, as bytes take 256 for 0.
pub(super) fn holding<const I: usize>(indices: Tensor<I, Int>, len: usize) -> Tensor<I, Int> {
    match len {
        _ if len > i32::MAX as usize => indices.cast(IntDType::I64),
        _ if indices.dtype().size() < 4 => indices.cast(IntDType::I32),
        _ => indices,
    }
}

/// Which indices are not in `range`.
pub(super) fn outside<const I: usize>(indices: &Tensor<I, Int>, range: &Range<usize>) -> Tensor<I, Bool> {
    let below = indices.clone().lower_scalar(range.start as i64);
    below.bool_or(indices.clone().greater_equal_scalar(range.end as i64))
}
