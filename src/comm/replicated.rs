//! [`ReplicatedValue`]: what several ranks hold alike.

use std::fmt;

/// What several ranks hold alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReplicatedValue {
    /// A parameter, or this rank's shard of it, as it is stored.
    Weight,
    /// A parameter that was gathered from the shards.
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
