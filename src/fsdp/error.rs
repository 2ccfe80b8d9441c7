//! [`FsdpError`]: why a module could not be sharded.

use crate::pattern::PatternError;

/// Why a module could not be sharded.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FsdpError {
    /// The mesh has the wrong number of dimensions.
    #[error(
        "fully_shard takes a 1-D mesh [shard] or a 2-D mesh [replicate, shard], not {mesh}; \
         slice or flatten it first"
    )]
    MeshDims {
        /// The mesh.
        mesh: String,
    },
    /// A unit or ignore pattern cannot be parsed.
    #[error("`{pattern}` is no path pattern: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A unit or ignore pattern matches nothing in the model.
    #[error("the pattern `{pattern}` matches no {what} of the model; it has {present}")]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// What was looked for: modules or parameters.
        what: &'static str,
        /// What there is.
        present: String,
    },
    /// The shard-placement function returned something that does not fit the parameter.
    #[error(
        "parameter `{param}` of shape {shape:?} cannot be placed as {placement}: \
         return `Shard(dim)` with dim below {ndim}, `Replicate`, or `None` for `Shard(0)`",
        ndim = shape.len()
    )]
    Placement {
        /// Path of the parameter.
        param: String,
        /// Its global shape.
        shape: Vec<usize>,
        /// What the function returned.
        placement: String,
    },
    /// burn's layer reads the parameter's stored shape, which this placement would change.
    #[error(
        "parameter `{param}` cannot be placed as {placement}: burn's {module} reads its stored \
         shape in forward; use {remedy}, or `None`"
    )]
    StoredShape {
        /// Path of the parameter.
        param: String,
        /// The layer.
        module: &'static str,
        /// What was asked for.
        placement: String,
        /// What works.
        remedy: String,
    },
    /// The parameter has a reparameterization already, and burn allows one.
    #[error(
        "parameter `{param}` has the reparameterization `{name}`, and burn allows one a parameter; \
         materialize it first, or ignore the parameter"
    )]
    Reparameterized {
        /// Path of the parameter.
        param: String,
        /// Name of its reparameterization.
        name: String,
    },
    /// Two fields hold clones of one parameter.
    #[error(
        "`{param}` and `{other}` are clones of one parameter, of which burn's optimizers step one; \
         keep it in one field and read that in both places: `embedding.weight.val()`"
    )]
    Tied {
        /// Path of the first.
        param: String,
        /// Path of the second.
        other: String,
    },
    /// The model was walked twice and showed different parameters.
    #[error(
        "parameter `{param}` was planned but not met again while sharding; does the module's `map` visit what its `visit` does?"
    )]
    NotMet {
        /// Path of the parameter.
        param: String,
    },
    /// `ReshardAfterForward::Ranks` does not divide the shard dimension.
    #[error(
        "ReshardAfterForward::Ranks({ranks}) does not divide the {size} ranks of mesh dimension \
         `{dim}`; use one of its divisors"
    )]
    ReshardRanks {
        /// The number asked for.
        ranks: usize,
        /// Size of the shard dimension.
        size: usize,
        /// Its name.
        dim: String,
    },
    /// The data-parallel and the tensor-parallel mesh do not make one mesh.
    #[error(
        "the parameters are parallelized on {tensor}, which is no other part of one mesh than {data}; \
         slice both out of one mesh: `mesh.slice([\"replicate\", \"shard\"])` for fully_shard and \
         `mesh.slice([\"tp\"])` for parallelize"
    )]
    Meshes {
        /// The mesh given to `fully_shard`.
        data: String,
        /// The mesh given to `parallelize`.
        tensor: String,
    },
    /// Parameters of one unit are parallelized on different meshes.
    #[error(
        "one unit would hold `{param}`, parallelized on {mesh}, and `{other_param}`, parallelized on \
         {other_mesh}; parallelize both on one mesh, or make them separate units"
    )]
    TensorMeshes {
        /// Path of a parameter.
        param: String,
        /// Its mesh.
        mesh: String,
        /// Path of the first parameter on another mesh.
        other_param: String,
        /// That mesh.
        other_mesh: String,
    },
    /// The module is a unit already.
    #[error("the module is sharded already (unit `{unit}`); call fully_shard once a module")]
    AlreadySharded {
        /// The unit.
        unit: String,
    },
    /// The module is not sharded.
    #[error("the module is no unit; pass a module that fully_shard made one")]
    NotSharded,
}

impl From<PatternError> for FsdpError {
    fn from(PatternError { pattern, reason }: PatternError) -> Self {
        Self::Pattern { pattern, reason }
    }
}
