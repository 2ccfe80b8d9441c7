//! [`FsdpError`]: errors of [`fully_shard`](super::fully_shard), [`remesh`](super::remesh),
//! [`compare`](fn@super::compare) and [`GradScaler`](super::GradScaler).

use super::compare::Comparison;
use crate::placement::PlacementError;

/// Error of [`fully_shard`](super::fully_shard), [`remesh`](super::remesh),
/// [`compare`](fn@super::compare) or [`GradScaler`](super::GradScaler).
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FsdpError {
    /// The mesh has the wrong number of dimensions.
    #[error(
        "fully_shard accepts a 1-D mesh [shard] or a 2-D mesh [replicate, shard], not {mesh}. \
         Slice or flatten it first, or name its dimensions with `FullyShard::with_shard_dims`"
    )]
    MeshDims {
        /// The mesh.
        mesh: String,
    },
    /// The configuration names mesh dimensions that replicate, but none that shards.
    #[error(
        "`with_replicate_dims` names dimensions of {mesh}, but `with_shard_dims` names none. \
         Name the dimensions that shard"
    )]
    NoShardDims {
        /// The mesh.
        mesh: String,
    },
    /// The placement function named a mesh dimension that is not data-parallel, or over which the
    /// parameter is already placed.
    #[error(
        "parameter `{param}` cannot be sharded over mesh dimension `{mesh_dim}`: the dimensions of {mesh} that shard \
         or replicate, and do not place it yet, are {free:?}. Pass some of these to `ParamPlacement::with_mesh_dims`"
    )]
    MeshDimInUse {
        /// Path of the parameter.
        param: String,
        /// The dimension.
        mesh_dim: String,
        /// The mesh.
        mesh: String,
        /// Names of the dimensions that are available.
        free: Vec<String>,
    },
    /// The mesh passed to [`fully_shard`](super::fully_shard) has dimensions over which
    /// `parallelize` placed the parameter, and the configuration names no dimensions.
    #[error(
        "parameter `{param}` is parallelized over `{mesh_dim}`, so `fully_shard` cannot use that dimension of {mesh} \
         too. Pass the dimensions that are left: `fully_shard(model, &mesh.slice({rest})?, ..)`. If ranks along \
         `{mesh_dim}` have distinct data, as with experts, name the dimensions that shard with \
         `FullyShard::with_shard_dims`"
    )]
    TensorParallelDim {
        /// Path of the parameter.
        param: String,
        /// The dimension over which it is parallelized.
        mesh_dim: String,
        /// The mesh.
        mesh: String,
        /// Names of the other dimensions, as an argument of `DeviceMesh::slice`.
        rest: String,
    },
    /// `parallelize` placed the parameter over all mesh dimensions that shard.
    #[error(
        "{mesh} has no dimension over which parameter `{param}` can be sharded, because `parallelize` placed it over \
         all that shard. Add a dimension of size 1, such as `efsdp` in \
         `mesh.unflatten(\"dp\", [1, 4], [\"efsdp\", \"ep\"])`"
    )]
    NoShardDimLeft {
        /// Path of the parameter.
        param: String,
        /// The mesh.
        mesh: String,
    },
    /// `parallelize` replicated a parameter over ranks that have distinct data.
    #[error(
        "`parallelize` placed parameter `{param}` as `Replicate` over mesh dimension `{mesh_dim}`, whose ranks have \
         distinct data. Parallelize over it only the modules that it shards, such as experts, and the others over the \
         other dimensions"
    )]
    ReplicatedOverDataDim {
        /// Path of the parameter.
        param: String,
        /// The dimension.
        mesh_dim: String,
    },
    /// The shard-placement function returned a placement that does not fit the parameter.
    #[error(
        "parameter `{param}` of shape {shape:?} cannot be placed as {placement}. \
         Return `Shard(dim)` with dim below {ndim}, `Replicate`, or `None` for `Shard(0)`",
        ndim = shape.len()
    )]
    Placement {
        /// Path of the parameter.
        param: String,
        /// Global shape of the parameter.
        shape: Vec<usize>,
        /// Placement that the function returned.
        placement: String,
    },
    /// The shard-placement function returned shard sizes that are not one per rank, or that do not
    /// add up to the dimension.
    #[error(
        "parameter `{param}` cannot be sharded along dimension {dim} over the ranks of mesh dimension \
         `{mesh_dim}`: {problem}"
    )]
    InvalidShardSizes {
        /// Path of the parameter.
        param: String,
        /// The tensor dimension.
        dim: usize,
        /// Name of the mesh dimension that shards.
        mesh_dim: String,
        /// Error that describes the shard sizes and the remedy.
        problem: PlacementError,
    },
    /// burn's layer reads the parameter's stored shape, which this placement would change.
    #[error(
        "parameter `{param}` cannot be placed as {placement}: burn's {module} reads its stored \
         shape in forward. Return {remedy} or `None`"
    )]
    StoredShape {
        /// Path of the parameter.
        param: String,
        /// The layer.
        module: &'static str,
        /// The requested placement.
        placement: String,
        /// The placement that keeps the dimensions that the layer reads.
        remedy: String,
    },
    /// The number in `ReshardAfterForward::Ranks` does not divide the size of the shard dimension.
    #[error(
        "ReshardAfterForward::Ranks({ranks}) does not divide the {size} ranks of mesh dimension \
         `{dim}`. Use a divisor of {size}"
    )]
    ReshardRanks {
        /// The requested number.
        ranks: usize,
        /// Size of the shard dimension.
        size: usize,
        /// Name of the shard dimension.
        dim: String,
    },
    /// The new mesh would give this rank another shard than the model's current mesh.
    #[error(
        "unit `{unit}` cannot move to {mesh}: this rank holds shard {was}, and would have to hold {is}. Keep the ranks \
         of the dimension that shards, in their order, or load a checkpoint"
    )]
    IncompatibleMesh {
        /// The unit.
        unit: String,
        /// The mesh.
        mesh: String,
        /// The shard that the rank holds, such as `1 of 2`.
        was: String,
        /// The shard that it would have to hold.
        is: String,
    },
    /// CPU offload was requested, but the CPU backend on which optimizers would step the shards is
    /// missing.
    #[error(
        "shards cannot be in host memory: this crate was built without its feature `flex`, burn's CPU backend, on \
         which optimizers would step them. Enable the feature, or remove `FullyShard::with_offload`"
    )]
    NoHost,
    /// The configuration puts a module into two units.
    #[error(
        "module `{module}` would be in unit `{unit}` and in another one, but a module can be in one unit only. Exclude \
         it from a pattern of `with_units` or `with_group_unit`"
    )]
    ModuleInTwoUnits {
        /// Path of the module.
        module: String,
        /// One of the units, as the list of its modules.
        unit: String,
    },
    /// An element type of a mixed-precision policy is not a float type.
    #[error(
        "`{what}` cannot be {dtype}, because weights, gradients and activations are floats. Use F64, F32, F16 or BF16, \
         or remove the setting"
    )]
    ElementType {
        /// Name of the policy's setting.
        what: &'static str,
        /// The element type.
        dtype: String,
    },
    /// The ranks' device does not support the element type.
    #[error(
        "`{what}` cannot be {dtype}, which {device} does not support. Use another type, or remove the setting"
    )]
    DeviceElementType {
        /// Name of the policy's setting.
        what: &'static str,
        /// The element type.
        dtype: String,
        /// The device.
        device: String,
    },
    /// [`remesh`](super::remesh) was called for a parameter with tensor-parallel placements, which
    /// are bound to their mesh.
    #[error(
        "parameter `{param}` is parallelized and cannot leave its mesh. Load a checkpoint on the new mesh"
    )]
    Parallelized {
        /// Path of the parameter.
        param: String,
    },
    /// The module is an FSDP unit already.
    #[error(
        "the module is already sharded (unit `{unit}`). To shard it differently, make it an ordinary module first: \
         `fully_shard(full_model(&model)?, ..)`"
    )]
    AlreadySharded {
        /// The unit.
        unit: String,
    },
    /// [`compare`](fn@super::compare) received rows of different shapes on two ranks.
    #[error(
        "rank {other_rank} compares inputs of shapes {other:?}, and rank {first_rank} of {first:?}. Pass the same \
         number of rows on every rank, and let the closure capture tensors that have no rows"
    )]
    UnevenRows {
        /// Global rank of the first rank.
        first_rank: usize,
        /// Shapes of its tensors.
        first: Vec<Vec<usize>>,
        /// Global rank of the first rank that differs.
        other_rank: usize,
        /// Shapes of its tensors.
        other: Vec<Vec<usize>>,
    },
    /// [`compare`](fn@super::compare) cannot gather the parameter for a comparison.
    #[error(
        "a model with parameter `{param}` cannot be compared with the full one: {problem}. Compare the modules \
         around it one by one"
    )]
    NotComparable {
        /// Path of the parameter.
        param: String,
        /// The reason.
        problem: String,
    },
    /// [`compare`](fn@super::compare) found a difference between the sharded and the full model.
    #[error("{0}")]
    Differs(Box<Comparison>),
    /// The norm of gradients is infinite or NaN.
    #[error(
        "the norm of the gradients is {norm}, so they cannot be clipped to {max_norm}{}. They were not changed. Skip the \
         step, or find the layer whose outputs are the first that are not finite",
        at(param.as_deref())
    )]
    NonFiniteNorm {
        /// The norm.
        norm: f64,
        /// The norm to which they should have been clipped.
        max_norm: f64,
        /// Path of the first parameter whose gradient has an infinite or NaN element on this rank,
        /// if there is one.
        param: Option<String>,
    },
    /// [`GradScaler::unscale`](super::GradScaler::unscale) was called twice for one model in one
    /// step.
    #[error(
        "`GradScaler::unscale` was called twice for this model in one step. Call it once, with the sum of the \
         gradients, and `GradScaler::update` after the step"
    )]
    UnscaledTwice,
    /// [`GradScaler::step`](super::GradScaler::step) was called twice for one model in one step.
    #[error(
        "`GradScaler::step` was called twice for this model in one step. Call `GradScaler::update` after the step"
    )]
    SteppedTwice,
    /// [`GradScaler::update`](super::GradScaler::update) was called without gradients.
    #[error(
        "`GradScaler::update` was called, but no gradients were unscaled since the last call. Call `GradScaler::step` \
         with the gradients first"
    )]
    NothingUnscaled,
}

fn at(param: Option<&str>) -> String {
    param.map_or_else(String::new, |param| {
        format!(" (on this rank, the gradient of `{param}` is not finite)")
    })
}
