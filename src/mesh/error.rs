//! [`MeshError`]: a mesh that cannot be built, sliced or used.

/// Why a mesh could not be built, sliced or used.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The shape has no dimensions, or one of size 0.
    #[error("mesh shape {shape:?}: a mesh has at least one dimension, each of size 1 or more")]
    EmptyShape {
        /// The shape.
        shape: Vec<usize>,
    },
    /// The number of names is not the number of dimensions.
    #[error("{} names {names:?} for mesh shape {shape:?}: give one name per mesh dimension", names.len())]
    NameCount {
        /// Names given.
        names: Vec<String>,
        /// The shape.
        shape: Vec<usize>,
    },
    /// A name is empty.
    #[error("mesh dim {mesh_dim} has an empty name: name every mesh dimension")]
    EmptyName {
        /// The mesh dimension.
        mesh_dim: usize,
    },
    /// A name is given twice.
    #[error("mesh dim name `{name}` is given twice in {names:?}: name each mesh dimension once")]
    DuplicateName {
        /// The name.
        name: String,
        /// All names given.
        names: Vec<String>,
    },
    /// The world has fewer ranks than the mesh needs.
    #[error(
        "mesh shape {shape:?} needs {needed} ranks, but the world has {world_size}: launch {needed} ranks or make the mesh smaller"
    )]
    WorldTooSmall {
        /// The shape.
        shape: Vec<usize>,
        /// Ranks in the mesh.
        needed: usize,
        /// Ranks in the world.
        world_size: usize,
    },
    /// The list of ranks does not fill the shape.
    #[error("{given} ranks for mesh shape {shape:?}: list exactly {needed} ranks, row-major")]
    RankCount {
        /// Ranks given.
        given: usize,
        /// Ranks in the mesh.
        needed: usize,
        /// The shape.
        shape: Vec<usize>,
    },
    /// A rank is not in the world.
    #[error("rank {rank} is not in a world of {world_size} ranks: use ranks below {world_size}")]
    RankOutOfRange {
        /// The rank.
        rank: usize,
        /// Ranks in the world.
        world_size: usize,
    },
    /// A rank is listed twice.
    #[error("rank {rank} appears twice in the mesh: a rank has one coordinate")]
    DuplicateRank {
        /// The rank.
        rank: usize,
    },
    /// The calling rank is not part of the mesh, and asked for what only members have.
    #[error("rank {rank} is not in {mesh}: only its ranks can {action}; check `mesh.coordinate()` first")]
    NotAMember {
        /// The calling rank.
        rank: usize,
        /// The mesh.
        mesh: String,
        /// What was asked.
        action: &'static str,
    },
    /// A mesh dimension index past the end.
    #[error("mesh dim {mesh_dim} does not exist in {mesh}: use an index below {ndim}")]
    DimOutOfRange {
        /// The index.
        mesh_dim: usize,
        /// Dimensions of the mesh.
        ndim: usize,
        /// The mesh.
        mesh: String,
    },
    /// No dimension has this name.
    #[error("no mesh dim is named `{name}` in {mesh}: use one of {names:?}")]
    UnknownName {
        /// The name.
        name: String,
        /// Names of the mesh.
        names: Vec<String>,
        /// The mesh.
        mesh: String,
    },
    /// No name was given.
    #[error("no mesh dim named for a slice of {mesh}: give one name or more")]
    NoNames {
        /// The mesh.
        mesh: String,
    },
    /// The names come in another order than the mesh's dimensions.
    #[error("mesh dims {given:?} of {mesh} come in another order than in the mesh: list them as {expected:?}")]
    NameOrder {
        /// Names given.
        given: Vec<String>,
        /// The same names in the order of the mesh.
        expected: Vec<String>,
        /// The mesh.
        mesh: String,
    },
    /// Dimensions to flatten into one are not next to each other.
    #[error("mesh dims {given:?} of {mesh} are not adjacent: flatten adjacent dimensions, or slice them out first")]
    NotAdjacent {
        /// Names given.
        given: Vec<String>,
        /// The mesh.
        mesh: String,
    },
    /// Sizes that do not split a dimension.
    #[error("sizes {sizes:?} do not split mesh dim `{name}` of size {size}: their product must be {size}")]
    Unflatten {
        /// The dimension's name.
        name: String,
        /// Its size.
        size: usize,
        /// Sizes given.
        sizes: Vec<usize>,
    },
    /// Meshes to concatenate that are not slices of one mesh.
    #[error("{left} and {right} are not slices of one mesh: slice both from the mesh that holds all their dimensions")]
    DifferentRoots {
        /// One mesh.
        left: String,
        /// The other mesh.
        right: String,
    },
}
