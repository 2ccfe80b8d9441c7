//! [`ReshardAfterForward`].

/// When a unit's gathered parameters are freed between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReshardAfterForward {
    /// Free them after forward and gather them again in backward: the least memory.
    Always,
    /// Keep them until backward: no all-gather in backward. After a forward without one, as in evaluation, keep them for
    /// the next from the same shards.
    Never,
    /// [`Always`](Self::Always), but the root unit keeps: its backward follows at once.
    #[default]
    Auto,
    /// After forward keep a shard over this many neighbouring ranks, and gather over those in
    /// backward. Must divide the shard dimension of the mesh; 1 is [`Never`](Self::Never), the
    /// whole dimension is [`Always`](Self::Always).
    Ranks(usize),
}
