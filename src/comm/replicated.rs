//! [`ReplicatedValue`]: kind of a value that must be identical on several ranks.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kind of a value that must be identical on several ranks, which a replica check compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReplicatedValue {
    /// A parameter, or this rank's shard of it, as stored.
    Weight,
    /// An unsharded parameter, gathered from the shards.
    GatheredWeight,
    /// An averaged gradient.
    Gradient,
    /// A local tensor that the program passed for a DTensor
    /// ([`Launch::with_replica_checks`](super::Launch::with_replica_checks)).
    LocalTensor,
}

impl fmt::Display for ReplicatedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Weight => "weight",
            Self::GatheredWeight => "gathered weight",
            Self::Gradient => "gradient",
            Self::LocalTensor => "local tensor",
        })
    }
}
