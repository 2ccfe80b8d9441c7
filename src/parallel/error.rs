//! [`ParallelError`]: why a model could not be parallelized.

use crate::pattern::PatternError;
use crate::placement::Placement;

/// Why a model could not be parallelized, or its parameters read as such.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// The mesh has the wrong number of dimensions.
    #[error("parallelize takes a 1-D mesh, not {mesh}; slice it: `mesh.slice([\"tp\"])`")]
    MeshDims {
        /// The mesh.
        mesh: String,
    },
    /// A pattern cannot be parsed.
    #[error("`{pattern}` is no path pattern: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A pattern matches nothing in the model.
    #[error("the pattern `{pattern}` matches no {what} of the model; it has {present}")]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// What was looked for: modules or parameters.
        what: &'static str,
        /// What there is.
        present: String,
    },
    /// Two fields hold clones of one parameter.
    #[error(
        "`{param}` and `{other}` are clones of one parameter, of which burn's optimizers step one; \
         keep it in one field and read that in both places: `embedding.weight.dtensor()`"
    )]
    Tied {
        /// Path of the first.
        param: String,
        /// Path of the second.
        other: String,
    },
    /// A style was given to a layer it does not know.
    #[error(
        "the style {style} of pattern `{pattern}` does not know what becomes of `{param}` in a {layer} on mesh \
         dimension `{mesh_dim}`: it knows Linear and Embedding; name these layers themselves, or place the \
         parameter with `.with(\"{param}\", Shard(dim))`"
    )]
    UnknownLayer {
        /// The pattern.
        pattern: String,
        /// The style.
        style: String,
        /// Type of the module that the pattern names.
        layer: String,
        /// Path of a parameter inside.
        param: String,
        /// Name of the mesh dimension.
        mesh_dim: String,
    },
    /// A style places a parameter as it cannot be.
    #[error(
        "parameter `{param}` of shape {shape:?} cannot be placed as {placement} on mesh dimension `{mesh_dim}`: \
         use `Shard(dim)` with dim below {ndim}, or `Replicate`",
        ndim = shape.len()
    )]
    Placement {
        /// Path of the parameter.
        param: String,
        /// Its global shape.
        shape: Vec<usize>,
        /// The placement asked for.
        placement: Placement,
        /// Name of the mesh dimension.
        mesh_dim: String,
    },
    /// Attention heads cannot stay whole.
    #[error(
        "parameter `{param}` has {len} features in {heads} heads, which cannot stay whole over the {size} ranks of \
         mesh dimension `{mesh_dim}`: the number of heads must divide by that of ranks, and the features by that \
         of heads; use fewer ranks, or place the layer `Replicate`"
    )]
    Heads {
        /// Path of the parameter.
        param: String,
        /// Number of heads.
        heads: usize,
        /// Length of the split dimension.
        len: usize,
        /// Number of ranks.
        size: usize,
        /// Name of the mesh dimension.
        mesh_dim: String,
    },
    /// The layer needs parts of equal length.
    #[error(
        "dimension {dim} of parameter `{param}` has length {len}, which the {size} ranks of mesh dimension \
         `{mesh_dim}` cannot share evenly, as {layer} needs to split it into heads; use a number of ranks that \
         divides it, or place the layer `Replicate`"
    )]
    Uneven {
        /// Path of the parameter.
        param: String,
        /// The layer.
        layer: &'static str,
        /// The split dimension.
        dim: usize,
        /// Its length.
        len: usize,
        /// Number of ranks.
        size: usize,
        /// Name of the mesh dimension.
        mesh_dim: String,
    },
    /// The parameter has tensor-parallel placements already.
    #[error("parameter `{param}` is parallelized already; call parallelize once a model, with all styles in one plan")]
    AlreadyParallelized {
        /// Path of the parameter.
        param: String,
    },
    /// The parameter is sharded by `fully_shard`.
    #[error("parameter `{param}` is fully sharded already; call parallelize first, and fully_shard on its result")]
    FullySharded {
        /// Path of the parameter.
        param: String,
    },
    /// The parameter has a reparameterization already, and burn allows one.
    #[error(
        "parameter `{param}` has the reparameterization `{name}`, and burn allows one a parameter; materialize it first"
    )]
    Reparameterized {
        /// Path of the parameter.
        param: String,
        /// Name of its reparameterization.
        name: String,
    },
    /// The model was walked twice and showed different parameters.
    #[error("parameter `{param}` was planned but not met again; does the module's `map` visit what its `visit` does?")]
    NotMet {
        /// Path of the parameter.
        param: String,
    },
    /// A parameter without tensor-parallel placements was read as a DTensor on the tensor-parallel mesh.
    #[error(
        "parameter `{param}` was not parallelized, so it has no tensor-parallel mesh; call parallelize on the model \
         before fully_shard (an empty plan replicates everything), or read it with `val()`"
    )]
    NotParallelized {
        /// Path of the parameter, or its id.
        param: String,
    },
}

impl From<PatternError> for ParallelError {
    fn from(PatternError { pattern, reason }: PatternError) -> Self {
        Self::Pattern { pattern, reason }
    }
}
