//! [`PlacementError`]: a placement that does not fit its mesh, its tensor or its target.

use super::{PartialOp, Placement};

/// Reason why a placement, a layout or a redistribution was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// The number of placements is not the number of mesh dimensions.
    #[error(
        "{placements} placements for a mesh of {mesh_dims} dimensions {mesh_shape:?}. Give one placement per mesh \
         dimension"
    )]
    Count {
        /// Number of placements that were passed.
        placements: usize,
        /// Number of dimensions of the mesh.
        mesh_dims: usize,
        /// Shape of the mesh.
        mesh_shape: Vec<usize>,
    },
    /// A mesh dimension has no ranks.
    #[error(
        "mesh dimension {mesh_dim} of {mesh_shape:?} has size 0. Give every mesh dimension at least one rank"
    )]
    EmptyMesh {
        /// The mesh dimension.
        mesh_dim: usize,
        /// Shape of the mesh.
        mesh_shape: Vec<usize>,
    },
    /// A placement shards a dimension that the tensor does not have.
    #[error(
        "{} on mesh dimension {mesh_dim} does not fit a tensor of {ndim} dimensions. Shard a dimension below {ndim}",
        Placement::Shard(*dim)
    )]
    DimOutOfRange {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension that does not exist.
        dim: usize,
        /// Number of dimensions of the tensor.
        ndim: usize,
    },
    /// A shard order does not list exactly the mesh dimensions that shard its tensor dimension.
    #[error(
        "shard order {given:?} for tensor dimension {dim} does not match the mesh dimensions {expected:?} that shard it. List \
         each of them exactly once, outermost first"
    )]
    Order {
        /// The tensor dimension.
        dim: usize,
        /// Mesh dimensions in the order that was passed.
        given: Vec<usize>,
        /// Mesh dimensions that shard `dim`.
        expected: Vec<usize>,
    },
    /// A shard order lists a tensor dimension twice.
    #[error(
        "the shard order lists tensor dimension {dim} twice. Give one order per tensor dimension"
    )]
    OrderTwice {
        /// The tensor dimension.
        dim: usize,
    },
    /// Uneven shard sizes were passed for a mesh dimension that does not shard.
    #[error(
        "shard sizes {lengths:?} were given for mesh dimension {mesh_dim}, which has placement {placement}, but only a \
         shard has sizes. Place `S(d)` there, or omit the sizes"
    )]
    MeshDimNotSharded {
        /// The mesh dimension.
        mesh_dim: usize,
        /// Placement of the mesh dimension.
        placement: Placement,
        /// Shard sizes that were passed.
        lengths: Vec<usize>,
    },
    /// The number of uneven shard sizes is not the number of ranks.
    #[error(
        "{} shard sizes {lengths:?} for the {ranks} ranks of mesh dimension {mesh_dim}. Give one size per rank, and 0 for a \
         rank without elements",
        lengths.len()
    )]
    ShardSizeCount {
        /// The mesh dimension.
        mesh_dim: usize,
        /// Number of ranks of the mesh dimension.
        ranks: usize,
        /// Shard sizes that were passed.
        lengths: Vec<usize>,
    },
    /// Uneven shard sizes do not add up to the length that they split.
    #[error(
        "the shard sizes {lengths:?} on mesh dimension {mesh_dim} add up to {}, but they split a length of {len} of tensor \
         dimension {dim}. Give sizes that add up to this length on every rank, or none",
        lengths.iter().sum::<usize>()
    )]
    ShardSizeSum {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension.
        dim: usize,
        /// Shard sizes that were passed.
        lengths: Vec<usize>,
        /// Length that they split: that of the dimension, or of an interval that the outer mesh
        /// dimensions leave of it.
        len: usize,
    },
    /// Two mesh dimensions hold partial values whose reductions do not commute.
    #[error(
        "P({op}) on mesh dimension {mesh_dim} cannot be combined with P({other}) on mesh dimension {other_mesh_dim}: the value \
         would depend on which is reduced first. Redistribute one of them to Replicate before creating the other"
    )]
    MixedPartial {
        /// One mesh dimension.
        mesh_dim: usize,
        /// Operation of `mesh_dim`.
        op: PartialOp,
        /// The other mesh dimension.
        other_mesh_dim: usize,
        /// Operation of `other_mesh_dim`.
        other: PartialOp,
    },
    /// The target of a redistribution is a partial value that cannot be created.
    #[error(
        "cannot redistribute {from} to P({op}) on mesh dimension {mesh_dim}: only Replicate and Shard can become Partial, \
         and only P(sum). Keep {from}, or build the partial value from local tensors"
    )]
    PartialTarget {
        /// The mesh dimension.
        mesh_dim: usize,
        /// Placement before.
        from: Placement,
        /// Operation of the requested partial value.
        op: PartialOp,
    },
    /// The two layouts of a redistribution are for meshes of different shapes.
    #[error(
        "cannot redistribute from a mesh of shape {from:?} to one of shape {to:?}. Gather to Replicate, then \
         distribute on the other mesh"
    )]
    MeshShape {
        /// Mesh shape before.
        from: Vec<usize>,
        /// Mesh shape after.
        to: Vec<usize>,
    },
    /// A strided shard does not correspond to any shard order.
    #[error(
        "SS({dim},{split_factor}) on mesh dimension {mesh_dim} does not correspond to a shard order: the mesh dimensions to its \
         right that shard dimension {dim} allow the split factors {allowed:?}. Use one of these, or convert the tensor with \
         `DTensor::from_strided`"
    )]
    Strided {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension.
        dim: usize,
        /// The split factor.
        split_factor: usize,
        /// Split factors that a shard order can express here.
        allowed: Vec<usize>,
    },
    /// A strided shard has split factor 0.
    #[error(
        "SS({dim},0) on mesh dimension {mesh_dim} has split factor 0. Use a split factor of at least 1"
    )]
    SplitFactor {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension.
        dim: usize,
    },
    /// The text is not a placement.
    #[error(
        "`{text}` is not a placement. Write `R`, `S(0)` or `P(sum)` (operations: sum, avg, min, max, product), or \
         `SS(0,2)` for a strided shard"
    )]
    Unreadable {
        /// The text.
        text: String,
    },
}
