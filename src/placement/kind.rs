//! [`Placement`]: the relation between a tensor and the ranks along one mesh dimension.

use std::fmt;

use smallvec::SmallVec;

/// Elementwise operation that reduces the partial values of several ranks to one value.
///
/// PyTorch has two more. Here, operators implement them. A norm (`_NormPartial(p)`) is the sum or
/// the extremum of powers, with the root taken afterwards: the operator computes it that way, with
/// `P(sum)` or `P(max)` as an intermediate placement. A masked lookup (`_MaskPartial`) is a sum in
/// which each rank has zeros for the rows that it lacks: the mask is needed to compute the local
/// result, but not to reduce it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PartialOp {
    /// The sum over the ranks.
    Sum,
    /// The sum over the ranks, divided by their number.
    Avg,
    /// The elementwise minimum.
    Min,
    /// The elementwise maximum.
    Max,
    /// The elementwise product.
    Product,
}

/// Relation between a tensor and the ranks along one mesh dimension: replicated, sharded or
/// partial.
///
/// [`Display`](fmt::Display) writes placements as `R`, `S(0)` and `P(sum)`, and
/// [`FromStr`](std::str::FromStr) reads the same format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank holds the same value.
    Replicate,
    /// Rank `r` holds the `r`-th shard of this tensor dimension: a [`chunk`](super::chunk), or the
    /// uneven size that the [`Layout`](super::Layout) defines.
    Shard(usize),
    /// Every rank holds a partial value of full shape; reducing them yields the tensor.
    Partial(PartialOp),
}

/// Placements of all mesh dimensions, in order.
pub type Placements = SmallVec<[Placement; 3]>;

impl Placement {
    /// Returns the tensor dimension that this placement shards, if any.
    pub fn shard_dim(self) -> Option<usize> {
        match self {
            Self::Shard(dim) => Some(dim),
            _ => None,
        }
    }

    /// Returns true if this is [`Replicate`](Self::Replicate).
    pub fn is_replicate(self) -> bool {
        self == Self::Replicate
    }

    /// Returns the operation that reduces the partial values, if this is
    /// [`Partial`](Self::Partial).
    pub fn partial_op(self) -> Option<PartialOp> {
        match self {
            Self::Partial(op) => Some(op),
            _ => None,
        }
    }
}

impl PartialOp {
    pub(crate) const ALL: [Self; 5] = [Self::Sum, Self::Avg, Self::Min, Self::Max, Self::Product];

    /// Returns true if reductions by `self` and by `other` over two mesh dimensions commute.
    pub(super) fn commutes_with(self, other: Self) -> bool {
        let linear = |op| matches!(op, Self::Sum | Self::Avg);
        self == other || (linear(self) && linear(other))
    }
}

impl fmt::Display for PartialOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
        })
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("R"),
            Self::Shard(dim) => write!(f, "S({dim})"),
            Self::Partial(op) => write!(f, "P({op})"),
        }
    }
}
