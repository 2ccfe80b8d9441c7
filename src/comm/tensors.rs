//! Arguments and reductions of collectives: [`ShardedTensor`], [`TensorMeta`], [`ReduceOp`].

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Shape};
use serde::{Deserialize, Serialize};

use crate::placement::ShardSizes;

/// Reduction that combines the values of several ranks.
///
/// Reductions run in a fixed binary tree over group ranks, never in order of arrival, so that a
/// run is bitwise repeatable. f16 and bf16 accumulate in f32 and round once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// Bitwise and; integers and bools only.
    BitAnd,
    /// Bitwise or; integers and bools only.
    BitOr,
    /// Bitwise exclusive or; integers and bools only.
    BitXor,
    /// Sum over ranks of the values times a factor; floats only. f16 and bf16 are multiplied in
    /// f32.
    PremulSum(Factor),
}

/// Factor of [`ReduceOp::PremulSum`]. Two factors are equal if their bits are equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Factor(u64);

impl ReduceOp {
    /// Returns the reduction that sums the values times `factor`.
    pub fn premul_sum(factor: f64) -> Self {
        Self::PremulSum(Factor(factor.to_bits()))
    }
}

impl Factor {
    /// Returns the factor as a number.
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
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorMeta {
    /// Shape of the full tensor.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
}

/// One tensor that is sharded along `dim` over the group.
///
/// In an all-gather, `tensor` is the rank's own shard, which may be empty. In a reduce-scatter it
/// is the full tensor. `sizes` must be the same on every rank, so that every rank knows the size of
/// every shard.
#[derive(Debug, Clone)]
pub struct ShardedTensor {
    /// The shard or the full tensor; plain (no autodiff), of any kind.
    pub tensor: DispatchTensor,
    /// Sharded dimension.
    pub dim: usize,
    /// Sizes of the ranks' shards along `dim`.
    pub sizes: ShardSizes,
}
