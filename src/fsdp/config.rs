//! [`FullyShard`]: what to shard, how, and when to free it.

use std::fmt;
use std::sync::Arc;

use crate::param::ReshardAfterForward;
use crate::placement::Placement;

/// The parameter a shard-placement function decides about.
#[derive(Debug, Clone, Copy)]
pub struct ParamInfo<'a> {
    /// Full path in the model, such as `blocks.0.attention.query.weight`.
    pub path: &'a str,
    /// Global shape.
    pub shape: &'a [usize],
}

type PlacementFn = Arc<dyn Fn(ParamInfo<'_>) -> Option<Placement> + Send + Sync>;

/// Configuration of [`fully_shard`](super::fully_shard).
///
/// ```
/// # use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward};
/// let config = FullyShard::new()
///     .units(["blocks.*"])
///     .reshard_after_forward(ReshardAfterForward::Always);
/// ```
#[derive(Clone, Default)]
pub struct FullyShard {
    pub(super) units: Vec<String>,
    pub(super) ignored: Vec<String>,
    pub(super) reshard: ReshardAfterForward,
    pub(super) placement: Option<PlacementFn>,
}

impl FullyShard {
    /// One unit holding every parameter, [`ReshardAfterForward::Auto`], placement `Shard(0)`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a unit of every module whose path matches a pattern.
    ///
    /// A pattern is a path whose parts may hold `*`, `?` and `[0-9]`; `**` spans parts. Parameters
    /// that no pattern takes belong to the root unit.
    pub fn units<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.units.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Leaves the parameters whose path matches a pattern as they are: neither sharded nor reduced.
    pub fn ignore<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.ignored.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Sets when gathered parameters are freed.
    pub fn reshard_after_forward(mut self, reshard: ReshardAfterForward) -> Self {
        self.reshard = reshard;
        self
    }

    /// Chooses the dimension each parameter is cut along.
    ///
    /// `Shard(dim)` on any dimension, even or not; or `Replicate`, for a parameter every rank keeps
    /// whole and whose gradient is all-reduced. `None` is `Shard(0)`, but for the parameters whose
    /// stored shape burn's layers read in forward: `Replicate` for `gamma` of `BatchNorm` and
    /// `RmsNorm`, `Shard(1)` for `linear_inner.weight` of `PositionWiseFeedForward`.
    pub fn shard_placement_fn(
        mut self,
        placement: impl Fn(ParamInfo<'_>) -> Option<Placement> + Send + Sync + 'static,
    ) -> Self {
        self.placement = Some(Arc::new(placement));
        self
    }
}

impl fmt::Debug for FullyShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullyShard")
            .field("units", &self.units)
            .field("ignored", &self.ignored)
            .field("reshard_after_forward", &self.reshard)
            .field("shard_placement_fn", &self.placement.is_some())
            .finish()
    }
}
