//! What travels, and what becomes of it: [`Sharded`], [`TensorMeta`], [`ReduceOp`].

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Shape};

use crate::placement::Cut;

/// How values of several ranks become one.
///
/// Reductions run in a fixed binary tree over group ranks, never in order of arrival, so that a
/// run is bitwise repeatable. f16 and bf16 accumulate in f32 and round once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum over ranks.
    Sum,
    /// Sum over ranks divided by the number of ranks.
    Avg,
    /// Elementwise minimum.
    Min,
    /// Elementwise maximum.
    Max,
    /// Elementwise product.
    Product,
}

/// Shape and dtype of a tensor that a rank does not hold yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorMeta {
    /// Shape of the whole tensor.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
}

/// One tensor cut along `dim` over the group: rank `r` holds the `r`-th part of `cut`.
///
/// In an all-gather `tensor` is the rank's own piece (possibly empty); in a reduce-scatter it is
/// the whole. `cut` is the same on every rank, so that every rank knows every piece.
#[derive(Debug, Clone)]
pub struct Sharded {
    /// The piece or the whole; plain (no autodiff), any kind.
    pub tensor: DispatchTensor,
    /// The cut dimension.
    pub dim: usize,
    /// How the length of `dim` in the whole falls on the ranks.
    pub cut: Cut,
}
