//! [`Placement`]: how the ranks along one mesh dimension share a tensor.

use std::fmt;

use smallvec::SmallVec;

/// How the partial values of several ranks become one: what a collective can reduce, element by element.
///
/// PyTorch has two more, which are operators' affairs here. A norm's (`_NormPartial(p)`) is the sum or the extremum
/// of powers with the root taken afterwards: the operator is written so, and has `P(sum)` or `P(max)` between. That
/// of a masked lookup (`_MaskPartial`) is a sum, whose ranks have zeros for the rows that they lack: the mask is
/// needed where the local result is made, and by nobody who reduces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PartialOp {
    /// The value is the sum over the ranks.
    Sum,
    /// The value is the sum over the ranks, divided by their number.
    Avg,
    /// The value is the elementwise minimum.
    Min,
    /// The value is the elementwise maximum.
    Max,
    /// The value is the elementwise product.
    Product,
}

/// How the ranks along one mesh dimension share a tensor.
///
/// Written `R`, `S(0)` and `P(sum)`, by [`Display`](fmt::Display) and [`FromStr`](std::str::FromStr) alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank holds the same value.
    Replicate,
    /// Rank `r` holds the `r`-th part of this tensor dimension: a [`chunk`](super::chunk), or as
    /// long as the lengths say that a [`Layout`](super::Layout) has beside it.
    Shard(usize),
    /// Every rank holds a value of full shape; the tensor is their reduction.
    Partial(PartialOp),
}

/// One placement per mesh dimension.
pub type Placements = SmallVec<[Placement; 3]>;

impl Placement {
    /// The tensor dimension this placement shards, if it does.
    pub fn shard_dim(self) -> Option<usize> {
        match self {
            Self::Shard(dim) => Some(dim),
            _ => None,
        }
    }

    /// Whether this is [`Replicate`](Self::Replicate).
    pub fn is_replicate(self) -> bool {
        self == Self::Replicate
    }

    /// How it is yet to be reduced, if it is partial.
    pub fn partial_op(self) -> Option<PartialOp> {
        match self {
            Self::Partial(op) => Some(op),
            _ => None,
        }
    }
}

impl PartialOp {
    pub(crate) const ALL: [Self; 5] = [Self::Sum, Self::Avg, Self::Min, Self::Max, Self::Product];

    /// Whether reductions by `self` and by `other` over two mesh dimensions may be exchanged.
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
