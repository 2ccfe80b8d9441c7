//! [`PlacementError`]: a placement that does not fit its mesh, its tensor or its target.

use super::{PartialOp, Placement};

/// Why a placement, a layout or a redistribution was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// The number of placements is not the number of mesh dimensions.
    #[error(
        "{placements} placements for a mesh of {mesh_dims} dimensions {mesh_shape:?}: give one placement per mesh dimension"
    )]
    Count {
        /// Placements given.
        placements: usize,
        /// Dimensions of the mesh.
        mesh_dims: usize,
        /// Shape of the mesh.
        mesh_shape: Vec<usize>,
    },
    /// A mesh dimension has no ranks.
    #[error("mesh dim {mesh_dim} of {mesh_shape:?} has size 0: every mesh dimension needs at least one rank")]
    EmptyMesh {
        /// The mesh dimension.
        mesh_dim: usize,
        /// Shape of the mesh.
        mesh_shape: Vec<usize>,
    },
    /// A placement shards a dimension that the tensor lacks.
    #[error("{} on mesh dim {mesh_dim} does not fit a tensor of {ndim} dimensions: shard a dim below {ndim}", Placement::Shard(*dim))]
    DimOutOfRange {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension that is missing.
        dim: usize,
        /// Dimensions of the tensor.
        ndim: usize,
    },
    /// A shard order does not list exactly the mesh dimensions that shard its tensor dimension.
    #[error(
        "shard order {given:?} for tensor dim {dim}: list each of the mesh dims {expected:?} that shard it exactly once, outermost cut first"
    )]
    Order {
        /// The tensor dimension.
        dim: usize,
        /// Mesh dimensions given.
        given: Vec<usize>,
        /// Mesh dimensions that shard `dim`.
        expected: Vec<usize>,
    },
    /// A shard order lists a tensor dimension twice.
    #[error("the shard order lists tensor dim {dim} twice: give one order per tensor dimension")]
    OrderTwice {
        /// The tensor dimension.
        dim: usize,
    },
    /// Lengths for a mesh dimension that cuts nothing.
    #[error(
        "lengths {lengths:?} for mesh dim {mesh_dim}, which has {placement}: only a shard has lengths; place `S(d)` there, or leave them out"
    )]
    MeshDimNotSharded {
        /// The mesh dimension.
        mesh_dim: usize,
        /// Its placement.
        placement: Placement,
        /// The lengths given.
        lengths: Vec<usize>,
    },
    /// A ragged cut does not have one length per rank.
    #[error(
        "{} lengths {lengths:?} for the {ranks} ranks of mesh dim {mesh_dim}: give one length per rank, 0 for one that holds nothing",
        lengths.len()
    )]
    ShardSizeCount {
        /// The mesh dimension.
        mesh_dim: usize,
        /// Its size.
        ranks: usize,
        /// The lengths given.
        lengths: Vec<usize>,
    },
    /// The lengths of a ragged cut do not add up to what it cuts.
    #[error(
        "the lengths {lengths:?} on mesh dim {mesh_dim} add up to {}, but a rank's piece of tensor dim {dim} that they cut is {len} long: give lengths that add up to it on every rank, or none",
        lengths.iter().sum::<usize>()
    )]
    ShardSizeSum {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension.
        dim: usize,
        /// The lengths given.
        lengths: Vec<usize>,
        /// Length of a piece that they cut: the dimension, or what the cuts outside leave of it.
        len: usize,
    },
    /// Two mesh dimensions hold partial values whose reductions cannot be exchanged.
    #[error(
        "P({op}) on mesh dim {mesh_dim} beside P({other}) on mesh dim {other_mesh_dim}: the value would depend on which is reduced first; redistribute one of them to Replicate before the other is made"
    )]
    MixedPartial {
        /// One mesh dimension.
        mesh_dim: usize,
        /// Its operation.
        op: PartialOp,
        /// The other mesh dimension.
        other_mesh_dim: usize,
        /// The operation there.
        other: PartialOp,
    },
    /// A redistribution whose target is a partial value that cannot be made.
    #[error(
        "cannot redistribute {from} to P({op}) on mesh dim {mesh_dim}: only Replicate and Shard become a Partial, and only P(sum); keep {from}, or build the partial value from local tensors"
    )]
    PartialTarget {
        /// The mesh dimension.
        mesh_dim: usize,
        /// Placement before.
        from: Placement,
        /// Operation asked for.
        op: PartialOp,
    },
    /// A redistribution between layouts of different meshes.
    #[error(
        "cannot redistribute from a mesh of shape {from:?} to one of shape {to:?}: gather to Replicate, then distribute on the other mesh"
    )]
    MeshShape {
        /// Mesh shape before.
        from: Vec<usize>,
        /// Mesh shape after.
        to: Vec<usize>,
    },
    /// A strided shard that no shard order expresses.
    #[error(
        "SS({dim},{split_factor}) on mesh dim {mesh_dim} is no shard order: the mesh dims to its right that shard dim {dim} allow the split factors {allowed:?}; use one of these, or bring the tensor to a layout with `DTensor::from_strided`"
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
    /// A strided shard with split factor 0.
    #[error("SS({dim},0) on mesh dim {mesh_dim}: a split factor is at least 1")]
    SplitFactor {
        /// The mesh dimension.
        mesh_dim: usize,
        /// The tensor dimension.
        dim: usize,
    },
    /// Text that is no placement.
    #[error(
        "`{text}` is no placement: write `R`, `S(0)` or `P(sum)` (ops: sum, avg, min, max, product); a strided shard is `SS(0,2)`"
    )]
    Unreadable {
        /// The text.
        text: String,
    },
}
