//! [`Step`]: one row of the table of transitions, applied to one mesh dimension.

use smallvec::SmallVec;

use super::{Layout, PartialOp, Placement};

/// One change of placement on one mesh dimension (see the [table](super#the-table-of-transitions)).
///
/// A step's lengths follow from the layouts around it: with `m` the step's mesh dimension, a
/// gathered or padded dimension was cut by the [`cut`](Layout::shard_sizes) of `m` in the layout before the
/// step, and a dimension that is cut is so by the `cut` of `m` in the layout after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// `Shard(dim)` -> `Replicate`: concatenate the shards.
    AllGather {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension it sharded.
        dim: usize,
    },
    /// `Replicate` -> `Shard(dim)`: keep one's own part.
    Slice {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension to shard.
        dim: usize,
    },
    /// `Partial(op)` -> `Replicate`: reduce.
    AllReduce {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The reduction.
        op: PartialOp,
    },
    /// `Partial(op)` -> `Shard(dim)`: reduce, and keep one's own part.
    ReduceScatter {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension to shard.
        dim: usize,
        /// The reduction.
        op: PartialOp,
    },
    /// `Shard(from)` -> `Shard(to)`: exchange parts.
    AllToAll {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension it sharded.
        from: usize,
        /// The tensor dimension to shard.
        to: usize,
    },
    /// `Replicate` -> `Partial(sum)`: the first rank keeps its value, the others hold zeros.
    ReplicateToPartial {
        /// The mesh dimension.
        mesh_dim: usize,
    },
    /// `Shard(dim)` -> `Partial(sum)`: zeros around one's own shard.
    ShardToPartial {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension it sharded.
        dim: usize,
    },
}

impl Step {
    /// The step that takes mesh dimension `mesh_dim` from one placement to another.
    ///
    /// `None` where the table has no row.
    pub(super) fn between(mesh_dim: usize, from: Placement, to: Placement) -> Option<Self> {
        use Placement::{Partial, Replicate, Shard};
        Some(match (from, to) {
            (Shard(dim), Replicate) => Self::AllGather { mesh_dim, dim },
            (Shard(from), Shard(to)) if from != to => Self::AllToAll { mesh_dim, from, to },
            (Shard(dim), Partial(PartialOp::Sum)) => Self::ShardToPartial { mesh_dim, dim },
            (Replicate, Shard(dim)) => Self::Slice { mesh_dim, dim },
            (Replicate, Partial(PartialOp::Sum)) => Self::ReplicateToPartial { mesh_dim },
            (Partial(op), Replicate) => Self::AllReduce { mesh_dim, op },
            (Partial(op), Shard(dim)) => Self::ReduceScatter { mesh_dim, dim, op },
            _ => return None,
        })
    }

    /// The mesh dimension whose ranks take part.
    pub fn mesh_dim(self) -> usize {
        match self {
            Self::AllGather { mesh_dim, .. }
            | Self::Slice { mesh_dim, .. }
            | Self::AllReduce { mesh_dim, .. }
            | Self::ReduceScatter { mesh_dim, .. }
            | Self::AllToAll { mesh_dim, .. }
            | Self::ReplicateToPartial { mesh_dim }
            | Self::ShardToPartial { mesh_dim, .. } => mesh_dim,
        }
    }

    /// Whether this step and the one that follows it are one, over the ranks of both mesh dimensions:
    /// reductions by one operation, and cuts or gathers of one tensor dimension, which lie inside each
    /// other.
    pub(crate) fn can_fuse_with(self, next: Self) -> bool {
        match (self, next) {
            (Self::AllReduce { op, .. }, Self::AllReduce { op: next, .. }) => op == next,
            (Self::AllGather { dim, .. }, Self::AllGather { dim: next, .. })
            | (Self::Slice { dim, .. }, Self::Slice { dim: next, .. }) => dim == next,
            (Self::ReduceScatter { dim, op, .. }, Self::ReduceScatter { dim: next, op: by, .. }) => {
                (dim, op) == (next, by)
            }
            _ => false,
        }
    }

    /// The collective that the step is, if it communicates.
    pub(super) fn collective(self) -> Option<&'static str> {
        match self {
            Self::AllGather { .. } => Some("all-gather"),
            Self::AllReduce { .. } => Some("all-reduce"),
            Self::ReduceScatter { .. } => Some("reduce-scatter"),
            Self::AllToAll { .. } => Some("all-to-all"),
            Self::Slice { .. } | Self::ReplicateToPartial { .. } | Self::ShardToPartial { .. } => None,
        }
    }

    /// Whether the step communicates.
    pub fn is_collective(self) -> bool {
        self.collective().is_some()
    }

    /// The collectives that the gradient takes on its way back, to where the layout was `before`, and what each of
    /// `ranks` ranks sends in each: the table of [`dtensor`](crate::dtensor).
    pub(super) fn undone_by(self, before: &Layout, ranks: u64) -> SmallVec<[(&'static str, u64); 2]> {
        let local = before.local_share();
        let part = local / ranks * (ranks - 1);
        let mut undone = SmallVec::new();
        match self {
            // With the extremum, to see who holds it.
            Self::ReduceScatter { op: PartialOp::Min | PartialOp::Max, .. } => undone.push(("all-gather", 2 * part)),
            Self::Slice { .. } | Self::ReduceScatter { .. } => undone.push(("all-gather", part)),
            Self::AllToAll { .. } => undone.push(("all-to-all", part)),
            Self::AllGather { .. }
            | Self::AllReduce { .. }
            | Self::ReplicateToPartial { .. }
            | Self::ShardToPartial { .. } => {}
        }
        // The derivative of what is no sum asks for the other ranks' values.
        match self {
            Self::AllReduce { op, .. } | Self::ReduceScatter { op, .. } => match op {
                PartialOp::Sum | PartialOp::Avg => {}
                PartialOp::Min | PartialOp::Max => undone.push(("all-reduce", 2 * part)),
                PartialOp::Product => undone.push(("all-gather", local * (ranks - 1))),
            },
            _ => {}
        }
        undone
    }

    /// What a rank sends when `before` is the layout before the step, in units of
    /// [`FULL_TENSOR`](Self::FULL_TENSOR) per tensor. Ragged parts count as even ones: a plan depends on no shape.
    pub(super) fn traffic(self, before: &Layout) -> u64 {
        self.traffic_over(before, before.mesh_shape()[self.mesh_dim()] as u64)
    }

    /// [`traffic`](Self::traffic) of steps of this kind that are [one](Self::can_fuse_with), over `ranks` ranks.
    pub(super) fn traffic_over(self, before: &Layout, ranks: u64) -> u64 {
        let local = before.local_share();
        match self {
            Self::AllGather { .. } => local * (ranks - 1),
            Self::AllToAll { .. } | Self::ReduceScatter { .. } => local / ranks * (ranks - 1),
            Self::AllReduce { .. } => 2 * (local / ranks * (ranks - 1)),
            Self::Slice { .. } | Self::ReplicateToPartial { .. } | Self::ShardToPartial { .. } => 0,
        }
    }

    /// The traffic unit: a whole tensor.
    pub(super) const FULL_TENSOR: u64 = 1 << 40;
}

impl Layout {
    /// Part of a tensor that a rank holds, in units of [`Step::FULL_TENSOR`]. Uneven shards count as even ones.
    pub(super) fn local_share(&self) -> u64 {
        let sharding_dims = self.orders().flat_map(|(_, sharding_dims)| sharding_dims);
        sharding_dims.fold(Step::FULL_TENSOR, |local, &sharding_dim| local / self.mesh_shape()[sharding_dim] as u64)
    }
}
