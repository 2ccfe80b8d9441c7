//! Lookups along a sharded dimension: each rank looks up the rows that it holds and returns zeros
//! for the others. The sum over the ranks is the result.
//!
//! ```text
//! indices [4, 0, 7, 2]                       rank 0: rows 0..4          rank 1: rows 4..8
//! local indices, 0 for rows of other ranks   [0, 0, 0, 2]               [0, 0, 3, 0]
//! results, zeros for rows of other ranks     [0, x0, 0, x2]             [x4, 0, x7, 0]
//! ```
//!
//! No row is moved, and no rank needs to know the rows of the others. Updates add one row to the
//! shard: it receives the updates of other ranks' rows and is then dropped.
//!
//! An index outside the dimension stays out of bounds on every rank. burn's operator then handles
//! it as on an unsharded tensor (Flex panics).

use std::ops::Range;

use burn::tensor::{Bool, DType, Int, IntDType, Shape, Tensor};

use super::Operator;
use crate::dtensor::Kind;

/// Returns this rank's interval of dimension `dim` of input `at`, or `None` if the rank holds all
/// of it.
pub(super) fn part(op: &Operator, at: usize, dim: usize) -> Option<Range<usize>> {
    let range = op.input_range(at, dim);
    (range.len() < op.input_spec(at).shape()[dim]).then_some(range)
}

/// Looks `indices` up in `x`, this rank's rows `range` of dimension `dim`.
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

/// Returns `found` with the element type `dtype`: burn-flex 0.22 returns booleans as bytes.
pub(super) fn of_type<const D: usize, K: Kind>(found: Tensor<D, K>, dtype: DType) -> Tensor<D, K> {
    if found.dtype() == dtype {
        return found;
    }
    let device = found.device();
    Tensor::from_data(found.into_data().convert_dtype(dtype), (&device, dtype))
}

/// Updates `x`, this rank's rows `range` of dimension `dim`, at `indices`.
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

/// Appends a row to dimension `dim` of `x`, which receives the updates of other ranks' rows.
pub(super) fn with_extra_row<const D: usize, K: Kind>(x: Tensor<D, K>, dim: usize) -> Tensor<D, K> {
    let mut extra = x.dims();
    extra[dim] = 1;
    let extra = Tensor::zeros(extra, (&x.device(), x.dtype()));
    Tensor::cat(vec![x, extra], dim)
}

/// Converts `indices` into `len` rows to indices into this rank's rows `range`. Rows of other ranks
/// get the index `other`, and the returned mask marks them. Indices that no rank holds stay out of
/// bounds.
pub(super) fn localize<const I: usize>(
    indices: Tensor<I, Int>,
    range: &Range<usize>,
    len: usize,
    other: usize,
) -> (Tensor<I, Int>, Tensor<I, Bool>) {
    let indices = holding(indices, len);
    let elsewhere = outside(&indices, range);
    let nowhere = outside(&indices, &(0..len));
    let local = moved(indices, &elsewhere, range.start, other);
    (local.mask_fill(nowhere, len as i64), elsewhere)
}

/// Returns `indices` relative to `start`, or `other` for those marked `elsewhere`. The mask is
/// applied first, so that unsigned indices do not go below 0.
pub(super) fn moved<const I: usize>(
    indices: Tensor<I, Int>,
    elsewhere: &Tensor<I, Bool>,
    start: usize,
    other: usize,
) -> Tensor<I, Int> {
    indices
        .mask_fill(elsewhere.clone(), (start + other) as i64)
        .sub_scalar(start as i64)
}

/// Converts `indices` to a type that holds every index of `len` rows and the bounds around them. In
/// a narrow type, a bound would wrap around: as bytes, 256 is 0.
pub(super) fn holding<const I: usize>(indices: Tensor<I, Int>, len: usize) -> Tensor<I, Int> {
    match len {
        _ if len > i32::MAX as usize => indices.cast(IntDType::I64),
        _ if indices.dtype().size() < 4 => indices.cast(IntDType::I32),
        _ => indices,
    }
}

/// Returns true for indices that are not in `range`.
pub(super) fn outside<const I: usize>(
    indices: &Tensor<I, Int>,
    range: &Range<usize>,
) -> Tensor<I, Bool> {
    let below = indices.clone().lower_scalar(range.start as i64);
    below.bool_or(indices.clone().greater_equal_scalar(range.end as i64))
}
