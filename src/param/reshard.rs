//! [`ReshardAfterForward`]: policy for freeing gathered parameters after forward.

/// Time at which a unit's gathered parameters are freed between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReshardAfterForward {
    /// Frees the parameters after forward and gathers them a second time in backward. Needs the least memory.
    Always,
    /// Keeps the parameters until backward, which then needs no all-gather. After a forward without a backward, as
    /// in evaluation, they are kept for the next forward with the same shards.
    Never,
    /// [`Never`](Self::Never) for the root unit, whose backward follows at once, and [`Always`](Self::Always) for
    /// all others.
    #[default]
    Auto,
    /// Keeps a shard over this many neighbouring ranks after forward, and gathers over these in backward. The
    /// number must divide the shard dimension of the mesh; 1 is [`Never`](Self::Never), the size of the dimension
    /// is [`Always`](Self::Always).
    Ranks(usize),
}
