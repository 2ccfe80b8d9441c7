//! [`ParallelError`]: why a model could not be parallelized.

use crate::placement::Placement;

/// Why a model could not be parallelized.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// On a mesh of several dimensions a plan must say which it is for.
    #[error(
        "the plan does not say for which dimension of {mesh} its entry `{pattern}` is: write \
         `Plan::new().on(\"tp\", plan)`, or slice the mesh: `mesh.slice(\"tp\")`"
    )]
    MeshDims {
        /// Pattern of the first entry that does not.
        pattern: String,
        /// The mesh.
        mesh: String,
    },
    /// A function gave a parameter another number of styles than the mesh has dimensions.
    #[error(
        "parameter `{param}` is given {given} styles on {mesh}: give one for each dimension of the mesh, such as \
         `[Replicate, Shard(0)]`, or slice the mesh: `mesh.slice(\"tp\")`"
    )]
    Styles {
        /// Path of the parameter.
        param: String,
        /// How many it is given.
        given: usize,
        /// The mesh.
        mesh: String,
    },
    /// A style was given to a layer it does not know.
    #[error(
        "the style {style} of pattern `{pattern}` does not know what becomes of `{param}` in a {layer} on mesh \
         dimension `{mesh_dim}`: colwise and rowwise know Linear and Embedding, and a style of your own \
         what it answers for; name these layers themselves, have `Style::custom` know the layer, or place the \
         parameter with `.with_style(\"{param}\", Shard(dim))`"
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
    /// A tensor of a prepared module is not placed as declared.
    #[error(
        "{what} {at} of module `{module}` is {found} on mesh dimension `{mesh_dim}`, and its PrepareModule declares \
         {declared}; redistribute it before, or declare what it is, `None` for any placement"
    )]
    Layout {
        /// Path of the module.
        module: String,
        /// Input or output.
        what: &'static str,
        /// Which, from 0.
        at: usize,
        /// What was declared.
        declared: Placement,
        /// What it is.
        found: Placement,
        /// Name of the mesh dimension.
        mesh_dim: String,
    },
    /// A prepared module was called with another number of tensors, or returned it.
    #[error(
        "module `{module}` has {given} {what}s, and its PrepareModule lists {prepared}; list each, in its order, with \
         `.{what}(None, None)` for one that stays as it is"
    )]
    Count {
        /// Path of the module.
        module: String,
        /// Input or output.
        what: &'static str,
        /// How many there are.
        given: usize,
        /// How many are listed.
        prepared: usize,
    },
    /// A plain tensor enters or leaves a module that has no mesh.
    #[error(
        "{what} {at} of the module is a plain tensor, and no parameter of the module was parallelized, so it has no \
         mesh; call parallelize on the model, or make a DTensor: `DTensor::from_local`"
    )]
    NoMesh {
        /// Input or output.
        what: &'static str,
        /// Which, from 0.
        at: usize,
    },
    /// The parameter has tensor-parallel placements already.
    #[error("parameter `{param}` is parallelized already; call parallelize once a model, with all styles in one plan")]
    AlreadyParallelized {
        /// Path of the parameter.
        param: String,
    },
    /// `fully_shard` cut the parameter into given lengths, of a dimension that would have others.
    #[error(
        "dimension {dim} of parameter `{param}` is fully sharded in lengths that are given for the whole, and mesh \
         dimension `{mesh_dim}` would cut it first; call parallelize first, and fully_shard with lengths of this \
         rank's tensor-parallel shard"
    )]
    Lengths {
        /// Path of the parameter.
        param: String,
        /// The tensor dimension.
        dim: usize,
        /// Name of the tensor-parallel mesh dimension.
        mesh_dim: String,
    },
    /// The parameter is sharded in a unit whose module is not in the model.
    #[error(
        "parameter `{param}` is sharded in the unit `{unit}`, and this is only a part of the unit's module; \
         parallelize the module that fully_shard was called on, or call parallelize first"
    )]
    PartOfUnit {
        /// Path of the parameter.
        param: String,
        /// The unit.
        unit: String,
    },
}
