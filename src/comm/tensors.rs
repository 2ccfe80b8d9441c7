//! Arguments and reductions of collectives: [`ShardedTensor`], [`TensorMeta`], [`ReduceOp`].

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Shape};

use crate::placement::ShardSizes;

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
    /// Bitwise and, of integers and bools.
    BitAnd,
    /// Bitwise or, of integers and bools.
    BitOr,
    /// Bitwise exclusive or, of integers and bools.
    BitXor,
    /// Sum over ranks of each term times a factor, of floats. f16 and bf16 are multiplied in f32.
    PremulSum(Factor),
}

/// What the terms of [`ReduceOp::PremulSum`] are multiplied by. Equal if to the bit.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Factor(u64);

impl ReduceOp {
    /// The sum of each term times `factor`.
    pub fn premul_sum(factor: f64) -> Self {
        Self::PremulSum(Factor(factor.to_bits()))
    }
}

impl Factor {
    /// The number.
    pub fn value(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl std::fmt::Debug for Factor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.value())
    }
}

/// Shape and dtype of a tensor that a rank does not hold yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorMeta {
    /// Shape of the whole tensor.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
}

/// One tensor cut along `dim` over the group: rank `r` holds the `r`-th part of `sizes`.
///
/// In an all-gather `tensor` is the rank's own piece (possibly empty); in a reduce-scatter it is
/// the whole. `sizes` is the same on every rank, so that every rank knows every piece.
#[derive(Debug, Clone)]
pub struct ShardedTensor {
    /// The piece or the whole; plain (no autodiff), any kind.
    pub tensor: DispatchTensor,
    /// The cut dimension.
    pub dim: usize,
    /// How the length of `dim` in the whole falls on the ranks.
    pub sizes: ShardSizes,
}
