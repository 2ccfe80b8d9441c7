//! [`ReplicatedValue`]: kind of a value that must be identical on several ranks.

use std::fmt;

/// Kind of a value that must be identical on several ranks, which the replica check compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReplicatedValue {
    /// A parameter, or this rank's shard of it, as stored.
    Weight,
    /// An unsharded parameter, gathered from the shards.
    GatheredWeight,
    /// An averaged gradient.
    Gradient,
}

impl fmt::Display for ReplicatedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Weight => "weight",
            Self::GatheredWeight => "gathered weight",
            Self::Gradient => "gradient",
        })
    }
}
