//! [`MeshError`]: a mesh that cannot be built, sliced or used.

/// Reason why a mesh could not be built, sliced or used.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The shape has no dimensions, or a dimension of size 0.
    #[error("mesh shape {shape:?} is empty. Use at least one dimension, each of size 1 or more")]
    EmptyShape {
        /// The shape.
        shape: Vec<usize>,
    },
    /// The number of names is not the number of dimensions.
    #[error("{} names {names:?} for mesh shape {shape:?}. Give one name per mesh dimension", names.len())]
    NameCount {
        /// Names that were passed.
        names: Vec<String>,
        /// The shape.
        shape: Vec<usize>,
    },
    /// A name is empty.
    #[error("mesh dimension {mesh_dim} has an empty name. Name every mesh dimension")]
    EmptyName {
        /// The mesh dimension.
        mesh_dim: usize,
    },
    /// Two dimensions have the same name.
    #[error(
        "the mesh dimension name `{name}` is given twice in {names:?}. Name each mesh dimension once"
    )]
    DuplicateName {
        /// The name.
        name: String,
        /// All names that were passed.
        names: Vec<String>,
    },
    /// The world has fewer ranks than the mesh needs.
    #[error(
        "mesh shape {shape:?} needs {needed} ranks, but the world has {world_size}. Launch {needed} ranks, or make \
         the mesh smaller"
    )]
    WorldTooSmall {
        /// The shape.
        shape: Vec<usize>,
        /// Number of ranks in the mesh.
        needed: usize,
        /// Number of ranks in the world.
        world_size: usize,
    },
    /// The number of ranks is not the product of the shape.
    #[error("{given} ranks for mesh shape {shape:?}. List exactly {needed} ranks, row-major")]
    RankCount {
        /// Number of ranks that were passed.
        given: usize,
        /// Number of ranks in the mesh.
        needed: usize,
        /// The shape.
        shape: Vec<usize>,
    },
    /// A rank is not in the world.
    #[error("rank {rank} is not in a world of {world_size} ranks. Use ranks below {world_size}")]
    RankOutOfRange {
        /// The rank.
        rank: usize,
        /// Number of ranks in the world.
        world_size: usize,
    },
    /// A rank is listed twice.
    #[error("rank {rank} appears twice in the mesh. List each rank once")]
    DuplicateRank {
        /// The rank.
        rank: usize,
    },
    /// The calling rank is outside the mesh, but called an operation for members only.
    #[error("rank {rank} is not in {mesh}, so it cannot {action}. Check `mesh.coordinate()` first")]
    NotAMember {
        /// The calling rank.
        rank: usize,
        /// The mesh.
        mesh: String,
        /// The operation, as a verb phrase.
        action: &'static str,
    },
    /// A mesh dimension index is past the end.
    #[error("mesh dimension {mesh_dim} does not exist in {mesh}. Use an index below {ndim}")]
    DimOutOfRange {
        /// The index.
        mesh_dim: usize,
        /// Number of dimensions of the mesh.
        ndim: usize,
        /// The mesh.
        mesh: String,
    },
    /// The world is not the result of shrinking the mesh's world.
    #[error(
        "{world} is not the result of shrinking the world of {mesh}. Pass the world that `World::shrink` returned on \
         the mesh's own world"
    )]
    OtherWorld {
        /// The mesh.
        mesh: String,
        /// The world.
        world: String,
    },
    /// Every index along a dimension has lost a rank.
    #[error(
        "every index along `{dim}` of {mesh} has lost at least one rank. Resume from a checkpoint"
    )]
    NoSurvivors {
        /// The mesh.
        mesh: String,
        /// The dimension.
        dim: String,
    },
    /// No dimension has this name.
    #[error("no mesh dimension is named `{name}` in {mesh}. Use one of {names:?}")]
    UnknownName {
        /// The name.
        name: String,
        /// Names of the mesh.
        names: Vec<String>,
        /// The mesh.
        mesh: String,
    },
    /// No name was passed.
    #[error("no mesh dimension is named for a slice of {mesh}. Give at least one name")]
    NoNames {
        /// The mesh.
        mesh: String,
    },
    /// The names are not in the order of the mesh's dimensions.
    #[error("mesh dimensions {given:?} are not in the order of {mesh}. List them as {expected:?}")]
    NameOrder {
        /// Names that were passed.
        given: Vec<String>,
        /// The same names in the order of the mesh.
        expected: Vec<String>,
        /// The mesh.
        mesh: String,
    },
    /// Two of the named dimensions share a dimension of the root.
    #[error(
        "mesh dimensions {given:?} of {mesh} overlap: `{name}` is in two of them. Name each dimension once, flattened or not"
    )]
    Overlap {
        /// Names that were passed.
        given: Vec<String>,
        /// Name of the shared dimension.
        name: String,
        /// Mesh that has the shared dimension.
        mesh: String,
    },
    /// The name for flattened dimensions already belongs to other dimensions.
    #[error(
        "`{name}` names the dims {taken:?} of {mesh}, so it cannot name {given:?} flattened. Choose another name with \
         `flatten_as`"
    )]
    NameTaken {
        /// The name.
        name: String,
        /// Dimensions that have the name.
        taken: Vec<String>,
        /// Dimensions to flatten.
        given: Vec<String>,
        /// Mesh that has both.
        mesh: String,
    },
    /// The number of communicators is not the number of dimensions.
    #[error(
        "{groups} groups for mesh shape {shape:?}. Give one communicator per mesh dimension, in order"
    )]
    GroupCount {
        /// Number of communicators that were passed.
        groups: usize,
        /// The shape.
        shape: Vec<usize>,
    },
    /// A communicator is not that of the caller's row along its dimension.
    #[error(
        "the communicator of mesh dimension `{name}` has ranks {found:?} and belongs to rank {of}, but rank {rank} needs \
         its own communicator of {row:?}, its row along `{name}`. Create it with `world.group(&{row:?})`, or list the \
         mesh's ranks in the order of the groups"
    )]
    GroupRanks {
        /// The dimension's name.
        name: String,
        /// The calling rank.
        rank: usize,
        /// Ranks that differ from the calling rank only along the dimension.
        row: Vec<usize>,
        /// Ranks of the communicator's group.
        found: Vec<usize>,
        /// Rank to which the communicator belongs.
        of: usize,
    },
    /// A position is past the last rank.
    #[error(
        "position {position} is past the {size} ranks of {mesh}. Count ranks from 0, row-major in the mesh"
    )]
    PositionOutOfRange {
        /// The position.
        position: usize,
        /// Number of ranks in the mesh.
        size: usize,
        /// The mesh.
        mesh: String,
    },
    /// No mesh is current on the calling thread.
    #[error(
        "no mesh is current on this thread. Call this inside `with_mesh(&mesh, || ..)`, or pass a mesh"
    )]
    NoCurrent,
    /// The sizes do not split the dimension.
    #[error(
        "sizes {sizes:?} do not split mesh dimension `{name}` of size {size}. Make their product {size}"
    )]
    Unflatten {
        /// The dimension's name.
        name: String,
        /// Size of the dimension.
        size: usize,
        /// Sizes that were passed.
        sizes: Vec<usize>,
    },
    /// The meshes to concatenate are not slices of one mesh.
    #[error(
        "{left} and {right} are not slices of one mesh. Slice both from the mesh that has all their dimensions"
    )]
    DifferentRoots {
        /// One mesh.
        left: String,
        /// The other mesh.
        right: String,
    },
}
