//! [`FsdpError`]: why a module could not be sharded.

use crate::placement::PlacementError;

/// Why a module could not be sharded.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FsdpError {
    /// The mesh has the wrong number of dimensions.
    #[error(
        "fully_shard takes a 1-D mesh [shard] or a 2-D mesh [replicate, shard], not {mesh}; \
         slice or flatten it first, or name its dimensions by `FullyShard::with_shard_dims`"
    )]
    MeshDims {
        /// The mesh.
        mesh: String,
    },
    /// Mesh dimensions are named that replicate, and none that shards.
    #[error("`with_replicate_dims` names dimensions of {mesh}, and `with_shard_dims` none: name those that shard")]
    NoShardDims {
        /// The mesh.
        mesh: String,
    },
    /// The placement function named a mesh dimension that has no part in data parallelism, or that places the parameter
    /// already.
    #[error(
        "parameter `{param}` cannot be sharded over mesh dimension `{mesh_dim}`: of {mesh} those that replicate or shard \
         and do not place it yet are {free:?}; `ParamPlacement::with_mesh_dims` names some of these"
    )]
    MeshDimInUse {
        /// Path of the parameter.
        param: String,
        /// The dimension.
        mesh_dim: String,
        /// The mesh.
        mesh: String,
        /// Names of those that there are.
        free: Vec<String>,
    },
    /// All mesh dimensions that shard place the parameter already.
    #[error(
        "no dimension of {mesh} is left to shard parameter `{param}` over: `parallelize` has placed it over all that \
         shard; add one of size 1, as `efsdp` in `mesh.unflatten(\"dp\", [1, 4], [\"efsdp\", \"ep\"])`"
    )]
    NoShardDimLeft {
        /// Path of the parameter.
        param: String,
        /// The mesh.
        mesh: String,
    },
    /// `parallelize` has a parameter replicated over ranks that have data of their own.
    #[error(
        "parameter `{param}` is placed `Replicate` by `parallelize` over mesh dimension `{mesh_dim}`, whose ranks have data \
         of their own: parallelize the modules alone that are cut over it, such as experts, and the others over the \
         other dimensions"
    )]
    ReplicatedOverDataDim {
        /// Path of the parameter.
        param: String,
        /// The dimension.
        mesh_dim: String,
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
    /// The shard-placement function returned lengths that are not one per rank, or do not add up.
    #[error(
        "parameter `{param}` cannot be cut along dimension {dim} over the ranks of mesh dimension \
         `{mesh_dim}`: {problem}"
    )]
    InvalidShardSizes {
        /// Path of the parameter.
        param: String,
        /// The tensor dimension.
        dim: usize,
        /// Name of the mesh dimension that shards.
        mesh_dim: String,
        /// What is wrong with the lengths, and what would be right.
        problem: PlacementError,
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
    /// The mesh shards otherwise than the one that the model is on.
    #[error(
        "unit `{unit}` cannot go on {mesh}: this rank holds shard {was}, and would have to hold {is}; keep ranks and order \
         of the dimension that shards, or load a checkpoint"
    )]
    IncompatibleMesh {
        /// The unit.
        unit: String,
        /// The mesh.
        mesh: String,
        /// The shard that the rank holds, such as `1 of 2`.
        was: String,
        /// The one that it would hold.
        is: String,
    },
    /// Shards were to be in host memory, where no optimizer could step them.
    #[error(
        "shards cannot be in host memory: this crate was built without its feature `flex`, burn's CPU backend, on which \
         optimizers would step them; enable it, or leave out `FullyShard::with_offload`"
    )]
    NoHost,
    /// A module is to be in two units.
    #[error(
        "module `{module}` is to be in the unit `{unit}`, and in another: a module is in one unit; leave it out of a pattern \
         of `with_units` or `with_group_unit`"
    )]
    ModuleInTwoUnits {
        /// Path of the module.
        module: String,
        /// One of the units, by its modules.
        unit: String,
    },
    /// An element type of a mixed-precision policy is no float type that tensors are stored in.
    #[error(
        "`{what}` cannot be {dtype}: weights, gradients and activations are floats; use F64, F32, F16 or BF16, or leave it out"
    )]
    ElementType {
        /// Which of the policy's.
        what: &'static str,
        /// The element type.
        dtype: String,
    },
    /// The ranks' device has no such element type.
    #[error("`{what}` cannot be {dtype}, which {device} does not have; use another, or leave it out")]
    DeviceElementType {
        /// Which of the policy's.
        what: &'static str,
        /// The element type.
        dtype: String,
        /// The device.
        device: String,
    },
    /// A parameter is tensor parallel, on a mesh of its own.
    #[error("parameter `{param}` is parallelized, and stays on the mesh of that: load a checkpoint on the new one")]
    Parallelized {
        /// Path of the parameter.
        param: String,
    },
    /// The module is a unit already.
    #[error(
        "the module is sharded already (unit `{unit}`); to shard it otherwise, make it an ordinary module first: \
         `fully_shard(full_model(&model)?, ..)`"
    )]
    AlreadySharded {
        /// The unit.
        unit: String,
    },
    /// [`GradScaler::unscale`](super::GradScaler::unscale) was called twice for one model in one step.
    #[error(
        "`GradScaler::unscale` was called twice for this model in one step. Call it once, with the sum of the gradients, and \
         `GradScaler::update` after the step."
    )]
    UnscaledTwice,
    /// [`GradScaler::step`](super::GradScaler::step) was called twice for one model in one step.
    #[error(
        "`GradScaler::step` was called twice for this model in one step. Call `GradScaler::update` after the step."
    )]
    SteppedTwice,
    /// [`GradScaler::update`](super::GradScaler::update) was called without gradients.
    #[error(
        "`GradScaler::update` was called, but no gradients were unscaled since the last call. Call `GradScaler::step` with \
         the gradients first."
    )]
    NothingUnscaled,
}
