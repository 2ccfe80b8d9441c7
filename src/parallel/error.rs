//! [`ParallelError`]: reason why a model could not be parallelized.

use crate::placement::Placement;

/// Reason why a model could not be parallelized.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// The mesh has several dimensions, but an entry of the plan does not name the one that it
    /// applies to.
    #[error(
        "entry `{pattern}` of the plan does not name the dimension of {mesh} that it applies to. Write \
         `Plan::new().with_mesh_dim_plan(\"tp\", plan)`, or slice the mesh: `mesh.slice(\"tp\")`"
    )]
    MeshDims {
        /// Pattern of the first entry without a mesh dimension.
        pattern: String,
        /// The mesh.
        mesh: String,
    },
    /// The number of styles of a parameter is not the number of mesh dimensions.
    #[error(
        "parameter `{param}` has {given} styles on {mesh}. Return one style per dimension of the mesh, such as \
         `[Replicate, Shard(0)]`, or slice the mesh: `mesh.slice(\"tp\")`"
    )]
    Styles {
        /// Path of the parameter.
        param: String,
        /// Number of styles that the function returned.
        given: usize,
        /// The mesh.
        mesh: String,
    },
    /// A style does not support the layer to which the plan applies it.
    #[error(
        "style {style} does not support `{param}` in {layer}, which pattern `{pattern}` matches, on mesh dimension \
         `{mesh_dim}`: colwise and rowwise support Linear and Embedding only. Narrow the pattern, handle the layer in \
         `Style::custom`, or place the parameter: `.with_style(\"{param}\", Shard(dim))`"
    )]
    UnknownLayer {
        /// The pattern.
        pattern: String,
        /// The style.
        style: String,
        /// Type of the module that the pattern matches.
        layer: String,
        /// Path of the parameter that the style does not support.
        param: String,
        /// Name of the mesh dimension.
        mesh_dim: String,
    },
    /// The placement of a style is not possible for the parameter.
    #[error(
        "parameter `{param}` of shape {shape:?} cannot be placed as {placement} on mesh dimension `{mesh_dim}`. Use \
         `Shard(dim)` with dim below {ndim}, or `Replicate`",
        ndim = shape.len()
    )]
    Placement {
        /// Path of the parameter.
        param: String,
        /// Global shape of the parameter.
        shape: Vec<usize>,
        /// The requested placement.
        placement: Placement,
        /// Name of the mesh dimension.
        mesh_dim: String,
    },
    /// The attention heads cannot be divided among the ranks without splitting a head.
    #[error(
        "parameter `{param}` has {len} features in {heads} heads, which the {size} ranks of mesh dimension \
         `{mesh_dim}` cannot share without splitting a head: the number of heads must be a multiple of the number of \
         ranks, and the number of features a multiple of the number of heads. Use fewer ranks, or place the layer \
         `Replicate`"
    )]
    Heads {
        /// Path of the parameter.
        param: String,
        /// Number of heads.
        heads: usize,
        /// Length of the sharded dimension.
        len: usize,
        /// Number of ranks that shard it.
        size: usize,
        /// Name of the mesh dimension.
        mesh_dim: String,
    },
    /// The layer requires shards of equal size.
    #[error(
        "dimension {dim} of parameter `{param}` has length {len}, which the {size} ranks of mesh dimension \
         `{mesh_dim}` cannot share evenly, but {layer} needs equal shards to split them into heads. Use a number of \
         ranks that divides the length, or place the layer `Replicate`"
    )]
    Uneven {
        /// Path of the parameter.
        param: String,
        /// The layer.
        layer: &'static str,
        /// The sharded dimension.
        dim: usize,
        /// Length of the dimension.
        len: usize,
        /// Number of ranks that shard it.
        size: usize,
        /// Name of the mesh dimension.
        mesh_dim: String,
    },
    /// An input or output of a module does not have the placement that the plan declares.
    #[error(
        "{what} {at} of module `{module}` is {found} on mesh dimension `{mesh_dim}`, but its \
         `PrepareModuleInputOutput` declares {declared}. Redistribute the tensor first, or declare its actual \
         placement, or `None` for any placement"
    )]
    Layout {
        /// Path of the module.
        module: String,
        /// Either `input` or `output`.
        what: &'static str,
        /// Index of the input or output, from 0.
        at: usize,
        /// Placement that was declared.
        declared: Placement,
        /// Placement that the tensor has.
        found: Placement,
        /// Name of the mesh dimension.
        mesh_dim: String,
    },
    /// A module was called with, or returned, another number of tensors than the plan lists.
    #[error(
        "module `{module}` has {given} {what}s, but its `PrepareModuleInputOutput` lists {prepared}. List each of \
         them in order, with `.with_{what}(None, None)` for one that stays as it is"
    )]
    Count {
        /// Path of the module.
        module: String,
        /// Either `input` or `output`.
        what: &'static str,
        /// Number of inputs or outputs at run time.
        given: usize,
        /// Number of inputs or outputs that are listed.
        prepared: usize,
    },
    /// A plain tensor enters or leaves a module that has no mesh.
    #[error(
        "{what} {at} of the module is a plain tensor, and the module has no mesh because none of its parameters was \
         parallelized. Call parallelize on the model, or create a DTensor: `DTensor::from_local`"
    )]
    NoMesh {
        /// Either `input` or `output`.
        what: &'static str,
        /// Index of the input or output, from 0.
        at: usize,
    },
    /// The parameter already has tensor-parallel placements.
    #[error(
        "parameter `{param}` is already parallelized. Call parallelize once per model, with all styles in one plan"
    )]
    AlreadyParallelized {
        /// Path of the parameter.
        param: String,
    },
    /// `fully_shard` has split a dimension into explicit shard sizes, and tensor parallelism would
    /// change the length that they split.
    #[error(
        "parameter `{param}` has explicit shard sizes along dimension {dim}, which add up to its full length, but \
         tensor parallelism over mesh dimension `{mesh_dim}` would leave each rank a shorter dimension to split. Call \
         parallelize first, then fully_shard with shard sizes for this rank's tensor-parallel shard"
    )]
    Lengths {
        /// Path of the parameter.
        param: String,
        /// The tensor dimension.
        dim: usize,
        /// Name of the tensor-parallel mesh dimension.
        mesh_dim: String,
    },
    /// The parameter is sharded in a unit, but the model contains only a submodule of the unit's
    /// module.
    #[error(
        "parameter `{param}` is sharded in the unit `{unit}`, but the model contains only a submodule of the unit's \
         module. Parallelize the module that fully_shard was called on, or call parallelize first"
    )]
    PartOfUnit {
        /// Path of the parameter.
        param: String,
        /// Label of the unit.
        unit: String,
    },
}
