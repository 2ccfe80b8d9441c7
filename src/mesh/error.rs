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
    /// A world is not what the mesh's own was shrunk to.
    #[error("{mesh} has nothing left in {world}: take what `World::shrink` has returned on the mesh's own world")]
    OtherWorld {
        /// The mesh.
        mesh: String,
        /// The world.
        world: String,
    },
    /// Of every index along a dimension a rank is lost.
    #[error("no index along `{dim}` of {mesh} has all of its ranks left: go on from a checkpoint")]
    NoSurvivors {
        /// The mesh.
        mesh: String,
        /// The dimension.
        dim: String,
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
    /// Several of the dimensions named are made of one.
    #[error(
        "mesh dims {given:?} of {mesh} overlap: `{name}` is in two of them; name each dimension once, flattened or not"
    )]
    Overlap {
        /// Names given.
        given: Vec<String>,
        /// The dimension that is in two.
        name: String,
        /// The mesh that has it.
        mesh: String,
    },
    /// A name for flattened dimensions that others have.
    #[error(
        "`{name}` names the dims {taken:?} of {mesh}, so it cannot name {given:?} flattened: use another with `flatten_as`"
    )]
    NameTaken {
        /// The name.
        name: String,
        /// The dimensions that have it.
        taken: Vec<String>,
        /// Those to flatten.
        given: Vec<String>,
        /// The mesh that has both.
        mesh: String,
    },
    /// The number of communicators is not the number of dimensions.
    #[error("{groups} groups for mesh shape {shape:?}: give one communicator per mesh dimension, in their order")]
    GroupCount {
        /// Communicators given.
        groups: usize,
        /// The shape.
        shape: Vec<usize>,
    },
    /// A communicator is not that of the caller's row.
    #[error(
        "the group of mesh dim `{name}` is of ranks {found:?}, as rank {of} has it, but rank {rank} needs one of \
         {row:?}, its row along `{name}`, of its own: make it with `world.group(&{row:?})`, or give the ranks as the \
         groups have them"
    )]
    GroupRanks {
        /// The dimension's name.
        name: String,
        /// The calling rank.
        rank: usize,
        /// Ranks that differ from it only along the dimension.
        row: Vec<usize>,
        /// Ranks of the group.
        found: Vec<usize>,
        /// The rank whose communicator it is.
        of: usize,
    },
    /// A position past the last rank.
    #[error("position {position} is past the {size} ranks of {mesh}: ranks are counted from 0, row-major in the mesh")]
    PositionOutOfRange {
        /// The position.
        position: usize,
        /// Ranks in the mesh.
        size: usize,
        /// The mesh.
        mesh: String,
    },
    /// There is no current mesh.
    #[error("no mesh is current on this thread: call this inside `with_mesh(&mesh, || ..)`, or pass a mesh")]
    NoCurrent,
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
