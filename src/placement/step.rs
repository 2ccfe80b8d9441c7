//! [`Step`]: one row of the table of transitions, applied to one mesh dimension.

use smallvec::SmallVec;

use super::{Layout, PartialOp, Placement};

/// A change of the placement of one mesh dimension (see the
/// [table](super#the-table-of-transitions)).
///
/// The shard sizes of a step are those of the layouts around it. A dimension that is gathered or
/// padded had the [`shard_sizes`](Layout::shard_sizes) of the layout before the step, and a
/// dimension that is sliced or scattered has those of the layout after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// `Shard(dim)` -> `Replicate`: concatenates the shards.
    AllGather {
        /// Mesh dimension of the step.
        mesh_dim: usize,
        /// Tensor dimension that was sharded.
        dim: usize,
    },
    /// `Replicate` -> `Shard(dim)`: keeps this rank's shard.
    Slice {
        /// Mesh dimension of the step.
        mesh_dim: usize,
        /// Tensor dimension to shard.
        dim: usize,
    },
    /// `Partial(op)` -> `Replicate`: reduces the partial values.
    AllReduce {
        /// Mesh dimension of the step.
        mesh_dim: usize,
        /// Operation that reduces the values.
        op: PartialOp,
    },
    /// `Partial(op)` -> `Shard(dim)`: reduces the partial values and keeps this rank's shard.
    ReduceScatter {
        /// Mesh dimension of the step.
        mesh_dim: usize,
        /// Tensor dimension to shard.
        dim: usize,
        /// Operation that reduces the values.
        op: PartialOp,
    },
    /// `Shard(from)` -> `Shard(to)`: exchanges blocks between all pairs of ranks.
    AllToAll {
        /// Mesh dimension of the step.
        mesh_dim: usize,
        /// Tensor dimension that was sharded.
        from: usize,
        /// Tensor dimension to shard.
        to: usize,
    },
    /// `Replicate` -> `Partial(sum)`: the first rank keeps its value, and the others hold zeros.
    ReplicateToPartial {
        /// Mesh dimension of the step.
        mesh_dim: usize,
    },
    /// `Shard(dim)` -> `Partial(sum)`: pads this rank's shard with zeros.
    ShardToPartial {
        /// Mesh dimension of the step.
        mesh_dim: usize,
        /// Tensor dimension that was sharded.
        dim: usize,
    },
}

impl Step {
    /// Returns the step that changes the placement of `mesh_dim` from `from` to `to`.
    ///
    /// `None` if the table has no such row.
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

    /// Returns the mesh dimension along which the step acts.
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

    /// Returns true if this step and the next can be fused into one over the ranks of both mesh
    /// dimensions. This applies to reductions by the same operation, and to slices or gathers of
    /// the same tensor dimension, which are nested.
    pub(crate) fn can_fuse_with(self, next: Self) -> bool {
        match (self, next) {
            (Self::AllReduce { op, .. }, Self::AllReduce { op: next, .. }) => op == next,
            (Self::AllGather { dim, .. }, Self::AllGather { dim: next, .. })
            | (Self::Slice { dim, .. }, Self::Slice { dim: next, .. }) => dim == next,
            (
                Self::ReduceScatter { dim, op, .. },
                Self::ReduceScatter {
                    dim: next, op: by, ..
                },
            ) => (dim, op) == (next, by),
            _ => false,
        }
    }

    /// Returns the name of the step's collective, or `None` if it does not communicate.
    pub(super) fn collective(self) -> Option<&'static str> {
        match self {
            Self::AllGather { .. } => Some("all-gather"),
            Self::AllReduce { .. } => Some("all-reduce"),
            Self::ReduceScatter { .. } => Some("reduce-scatter"),
            Self::AllToAll { .. } => Some("all-to-all"),
            Self::Slice { .. } | Self::ReplicateToPartial { .. } | Self::ShardToPartial { .. } => {
                None
            }
        }
    }

    /// Returns true if the step communicates.
    pub fn is_collective(self) -> bool {
        self.collective().is_some()
    }

    /// Returns the collectives that compute the gradient of the step's input, which is laid out as
    /// `before`. Each comes with the amount that every one of the `ranks` ranks sends; see the
    /// table of [`dtensor`](crate::dtensor).
    pub(super) fn undone_by(
        self,
        before: &Layout,
        ranks: u64,
    ) -> SmallVec<[(&'static str, u64); 2]> {
        let local = before.local_share();
        let part = local / ranks * (ranks - 1);
        let mut undone = SmallVec::new();
        match self {
            // The extremum is gathered too, to find the ranks that hold it.
            Self::ReduceScatter {
                op: PartialOp::Min | PartialOp::Max,
                ..
            } => undone.push(("all-gather", 2 * part)),
            Self::Slice { .. } | Self::ReduceScatter { .. } => undone.push(("all-gather", part)),
            Self::AllToAll { .. } => undone.push(("all-to-all", part)),
            Self::AllGather { .. }
            | Self::AllReduce { .. }
            | Self::ReplicateToPartial { .. }
            | Self::ShardToPartial { .. } => {}
        }
        // For reductions other than sums, the derivative depends on the other ranks' values.
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

    /// Returns the amount that a rank sends if `before` is the layout before the step, in units of
    /// [`FULL_TENSOR`](Self::FULL_TENSOR) per tensor. Uneven shards count as even ones, because a
    /// plan must not depend on the shape.
    pub(super) fn traffic(self, before: &Layout) -> u64 {
        self.traffic_over(before, before.mesh_shape()[self.mesh_dim()] as u64)
    }

    /// Returns the [`traffic`](Self::traffic) of several steps of this kind
    /// [fused](Self::can_fuse_with) into one, over `ranks` ranks.
    pub(super) fn traffic_over(self, before: &Layout, ranks: u64) -> u64 {
        let local = before.local_share();
        match self {
            Self::AllGather { .. } => local * (ranks - 1),
            Self::AllToAll { .. } | Self::ReduceScatter { .. } => local / ranks * (ranks - 1),
            Self::AllReduce { .. } => 2 * (local / ranks * (ranks - 1)),
            Self::Slice { .. } | Self::ReplicateToPartial { .. } | Self::ShardToPartial { .. } => 0,
        }
    }

    /// Unit of traffic: one full tensor.
    pub(super) const FULL_TENSOR: u64 = 1 << 40;
}

impl Layout {
    /// Returns the share of a tensor that a rank holds, in units of [`Step::FULL_TENSOR`]. Uneven
    /// shards count as even ones.
    pub(super) fn local_share(&self) -> u64 {
        let sharding_dims = self.orders().flat_map(|(_, sharding_dims)| sharding_dims);
        sharding_dims.fold(Step::FULL_TENSOR, |local, &sharding_dim| {
            local / self.mesh_shape()[sharding_dim] as u64
        })
    }
}
