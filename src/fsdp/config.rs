//! [`FullyShard`]: configuration of [`fully_shard`](super::fully_shard).

use std::fmt;
use std::sync::Arc;

use super::MixedPrecisionPolicy;
use crate::mesh::DimNames;
use crate::param::{BufferSync, OffloadPolicy, ReshardAfterForward};
use crate::placement::Placement;

/// Parameter for which a shard-placement function chooses a placement.
#[derive(Debug, Clone, Copy)]
pub struct ParamInfo<'a> {
    /// Full path in the model, such as `blocks.0.attention.query.weight`.
    pub path: &'a str,
    /// Shape of the parameter. For a parallelized parameter: shape of this rank's tensor-parallel
    /// shard.
    pub shape: &'a [usize],
}

/// Placement of a parameter on the ranks that shard, as a shard-placement function returns it.
///
/// Any [`Placement`] converts to it. [`uneven`](Self::uneven) adds a shard size for each rank,
/// [`with_mesh_dims`](Self::with_mesh_dims) selects the mesh dimensions that shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamPlacement {
    pub(super) placement: Placement,
    /// Shard sizes, if they are explicit.
    pub(super) lengths: Option<Arc<[usize]>>,
    /// The mesh dimensions that shard, if they differ from those of the call.
    pub(super) over: Option<Vec<String>>,
}

impl ParamPlacement {
    /// Creates the placement `Shard(dim)` with explicit shard sizes: one for each rank of the mesh
    /// dimension that shards, possibly 0. They must add up to the size of `dim`.
    pub fn uneven(dim: usize, lengths: impl Into<Arc<[usize]>>) -> Self {
        Self {
            placement: Placement::Shard(dim),
            lengths: Some(lengths.into()),
            over: None,
        }
    }

    /// Shards the parameter only over these data-parallel mesh dimensions. The other data-parallel
    /// dimensions replicate it, except those over which
    /// [`parallelize`](crate::parallel::parallelize) has placed it.
    ///
    /// ```
    /// # use burn_dtensor::fsdp::{FullyShard, ParamInfo, ParamPlacement};
    /// # use burn_dtensor::placement::Placement;
    /// // Every node holds the embeddings, sharded over its ranks. All other parameters are sharded over all ranks.
    /// let config = FullyShard::new().with_shard_dims(["node", "local"]).with_shard_placement_fn(|param: ParamInfo| {
    ///     param.path.starts_with("embedding").then(|| ParamPlacement::from(Placement::Shard(0)).with_mesh_dims("local"))
    /// });
    /// ```
    #[must_use]
    pub fn with_mesh_dims(mut self, dims: impl DimNames) -> Self {
        self.over = Some(owned(dims));
        self
    }
}

impl From<Placement> for ParamPlacement {
    fn from(placement: Placement) -> Self {
        Self {
            placement,
            lengths: None,
            over: None,
        }
    }
}

fn owned(names: impl DimNames) -> Vec<String> {
    names.dim_names().into_iter().map(Into::into).collect()
}

#[derive(Clone)]
pub(super) struct PlacementFn(
    pub(super) Arc<dyn Fn(ParamInfo<'_>) -> Option<ParamPlacement> + Send + Sync>,
);

impl fmt::Debug for PlacementFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PlacementFn")
    }
}

/// Configuration of [`fully_shard`](super::fully_shard).
///
/// ```
/// # use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward};
/// let config = FullyShard::new()
///     .with_units(["blocks.*"])
///     .with_reshard_after_forward(ReshardAfterForward::Always);
/// ```
#[derive(Debug, Clone)]
pub struct FullyShard {
    pub(super) units: Vec<String>,
    /// Patterns of the modules of each group unit.
    pub(super) groups: Vec<Vec<String>>,
    pub(super) ignored: Vec<String>,
    pub(super) reshard: ReshardAfterForward,
    pub(super) implicit_unshard: bool,
    pub(super) buffer_sync: BufferSync,
    /// True if each forward of the model makes its buffers equal on all ranks.
    pub(crate) forward_sync_buffers: bool,
    pub(super) placement: Option<PlacementFn>,
    /// Names of the mesh dimensions that shard.
    pub(super) shard_dims: Vec<String>,
    pub(super) replicate_dims: Vec<String>,
    /// True if `shard_dims` are those of the mesh, and not named by the program.
    pub(crate) has_default_dims: bool,
    /// True if it is an error that a rank does not use a parameter.
    pub(crate) refuses_unused: bool,
    /// Bytes of the first bucket of a backward and of the others, if units are reduced in buckets.
    pub(crate) buckets: Option<[usize; 2]>,
    pub(super) balanced: bool,
    pub(super) replica_check_every: u64,
    pub(super) weight_check: bool,
    pub(super) layer_warnings: bool,
    pub(super) dropout_warning: bool,
    pub(super) precision: MixedPrecisionPolicy,
    /// Policies of units by pattern.
    pub(super) precision_for: Vec<(Vec<String>, MixedPrecisionPolicy)>,
    pub(super) offload: OffloadPolicy,
    /// Policies of units by pattern.
    pub(super) offload_for: Vec<(Vec<String>, OffloadPolicy)>,
}

impl Default for FullyShard {
    fn default() -> Self {
        Self {
            units: Vec::new(),
            groups: Vec::new(),
            ignored: Vec::new(),
            reshard: ReshardAfterForward::default(),
            implicit_unshard: true,
            buffer_sync: BufferSync::default(),
            forward_sync_buffers: false,
            placement: None,
            shard_dims: Vec::new(),
            replicate_dims: Vec::new(),
            has_default_dims: false,
            refuses_unused: false,
            buckets: None,
            balanced: false,
            replica_check_every: 10,
            weight_check: false,
            layer_warnings: true,
            dropout_warning: true,
            precision: MixedPrecisionPolicy::default(),
            precision_for: Vec::new(),
            offload: OffloadPolicy::default(),
            offload_for: Vec::new(),
        }
    }
}

impl FullyShard {
    /// Creates the default configuration: one unit with all parameters,
    /// [`ReshardAfterForward::Auto`], placement `Shard(0)`, [`BufferSync::FirstRank`],
    /// [`with_replica_check_every(10)`](Self::with_replica_check_every).
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a unit of every module whose path matches a pattern.
    ///
    /// A pattern is a path whose components may contain `*`, `?` and `[0-9]`; `**` spans
    /// components. Parameters that are in no matching module belong to the root unit.
    pub fn with_units<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.units.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Makes one unit of all modules whose paths match these patterns. Use it for small modules
    /// that would otherwise need a collective each, or for distant modules that should be gathered
    /// together. Each call makes one unit.
    ///
    /// The group is used inside a forward that [`unit`](fn@super::unit) opens around all its
    /// modules. When this forward reaches the first of them, it gathers the parameters of all. They
    /// are freed when each module has run, or when the module in which the first one was opened is
    /// left. Code between the modules runs while the unit is open. A module that never runs only
    /// delays freeing. Without an enclosing unit, each module gathers its own parameters.
    ///
    /// ```
    /// # use burn_dtensor::fsdp::FullyShard;
    /// let config = FullyShard::new().with_units(["blocks.*"]).with_group_unit(["norm", "head"]);
    /// ```
    pub fn with_group_unit<S: Into<String>>(
        mut self,
        modules: impl IntoIterator<Item = S>,
    ) -> Self {
        self.groups
            .push(modules.into_iter().map(Into::into).collect());
        self
    }

    /// Excludes the parameters whose path matches a pattern: they are neither sharded nor reduced.
    /// If all parameters of a module are ignored, so are its buffers.
    ///
    /// For a weight with an adapter (LoRA), `layer.weight` matches only the stored value. The
    /// adapter's parameters have separate paths, such as `layer.weight.lora.a`.
    pub fn with_ignored<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.ignored.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Shards over these mesh dimensions, together as if they were one, with the last dimension
    /// varying fastest. Names must be in the mesh's order. Use it for a mesh that has other
    /// dimensions as well.
    ///
    /// Without this call, a 1-D mesh shards over its dimension, and a 2-D mesh over the second one.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn_dtensor::prelude::*;
    /// launch(Launch::threads(8), |world| {
    ///     // Data parallel over `dp`, context parallel over `cp`: all these ranks have distinct tokens.
    ///     let mesh = DeviceMesh::new(world, [2, 2, 2], ["dp", "cp", "tp"])?;
    ///     let layer = LinearConfig::new(8, 8).init(world.device());
    ///     let layer = fully_shard(layer, &mesh, FullyShard::new().with_shard_dims(["dp", "cp"]))?;
    ///     assert_eq!(layer.weight.base().dims(), [2, 8]);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn with_shard_dims(mut self, dims: impl DimNames) -> Self {
        self.shard_dims = owned(dims);
        self
    }

    /// Replicates over these mesh dimensions (HSDP), in addition to the dimensions that
    /// [`with_shard_dims`](Self::with_shard_dims) names. Dimensions that neither call names are not
    /// data-parallel.
    pub fn with_replicate_dims(mut self, dims: impl DimNames) -> Self {
        self.replicate_dims = owned(dims);
        self
    }

    /// Chooses shard sizes so that all ranks hold about the same number of bytes of a unit: two
    /// ranks differ by at most one row, the largest of the unit. Without this option each parameter
    /// is split into chunks, and the last ranks hold less or nothing: 8 ranks hold 2, 2, 2, 2, 1,
    /// 0, 0 and 0 of 9 rows.
    ///
    /// ```text
    /// weight [5, 3] and bias [4] over 3 ranks     weight's rows      bias'     elements on each rank
    /// in chunks                                   2 + 2 + 1          2 + 2 + 0    8 + 8 + 3
    /// balanced                                    2 + 2 + 1          1 + 0 + 3    7 + 6 + 6
    /// ```
    ///
    /// Rows are along the sharded dimension. [`ParamPlacement::uneven`] is not changed. Nor is a
    /// parameter whose tensor-parallel shards have different sizes along that dimension.
    pub fn with_balanced_bytes(mut self) -> Self {
        self.balanced = true;
        self
    }

    /// Sets when gathered parameters are freed between forward and backward.
    pub fn with_reshard_after_forward(mut self, reshard: ReshardAfterForward) -> Self {
        self.reshard = reshard;
        self
    }

    /// Sets whether a parameter may be read outside its [`unit`](fn@super::unit). Default: true.
    /// Such parameters are gathered and reduced one by one, and a warning names the first of each
    /// unit. With `false`, every rank that reads one fails with
    /// [`ParamError::ReadOutsideUnit`](crate::param::ParamError::ReadOutsideUnit).
    pub fn with_implicit_unshard(mut self, implicit: bool) -> Self {
        self.implicit_unshard = implicit;
        self
    }

    /// Sets whether [`fully_shard`](super::fully_shard) warns about layers of the model that
    /// compute something else on several ranks than on one device. Default: true.
    ///
    /// | layer | difference | warns if |
    /// |---|---|---|
    /// | burn's `BatchNorm` | each rank normalizes with the statistics of its own batch | several ranks are data-parallel |
    /// | burn's `Dropout` | masks depend on timing (see [`World::run_seeded`](crate::comm::World::run_seeded)) | several of them are in one process |
    ///
    /// A warning is one line with the paths of the layers, logged with [`log::warn!`] by the first
    /// rank. Without a logger it is printed to the standard error. A layer that is frozen, a batch
    /// norm that [`parallelize`](crate::parallel::parallelize) has placed, and a model on a single
    /// rank cause none. [`with_dropout_warning`](Self::with_dropout_warning) turns off
    /// the warning about `Dropout` only.
    pub fn with_layer_warnings(mut self, warnings: bool) -> Self {
        self.layer_warnings = warnings;
        self
    }

    /// Sets whether [`fully_shard`](super::fully_shard) warns about burn's `Dropout`, if it [warns
    /// about layers](Self::with_layer_warnings) at all. Default: true. Use `false` if the
    /// probability is 0, which `fully_shard` cannot see: other layers still cause a warning.
    pub fn with_dropout_warning(mut self, warning: bool) -> Self {
        self.dropout_warning = warning;
        self
    }

    /// Checks every `steps` steps that values which must be identical on several ranks are. Ranks
    /// compare 64-bit digests, which are sent with a unit's reductions. A difference fails all
    /// ranks with [`CommError::Diverged`](crate::comm::CommError::Diverged), which names the
    /// parameter, the step and two ranks that differ; with three or more replicas, the rank at
    /// fault. So silent data corruption by a faulty memory or processor is detected before it has
    /// spread far; with 1, in the backward of the step in which it occurs. Default: 10; 0 disables
    /// the check. The value must be equal on all ranks.
    ///
    /// The check covers each unit that trains a parameter, and compares what this crate computes in
    /// one order on all ranks: averaged gradients between replicas (HSDP), and, between the ranks
    /// that shard, the weights gathered in forward and the averaged gradients of parameters placed
    /// `Replicate`. Gradients are compared in the next reduction of any unit.
    /// [`with_weight_check`](Self::with_weight_check) adds the stored weights, which are the
    /// optimizer's work.
    ///
    /// A value that was wrong for several steps has spread, through gradients that were averaged
    /// with it. The named rank holds the wrong value, but may have received it from another rank.
    ///
    /// Steps are passes of a unit, counted from 1 when a forward begins with autodiff, even if
    /// several are made for one optimizer step.
    ///
    /// On devices other than the CPU values are not checked, except stored shards that are
    /// [offloaded](Self::with_offload).
    pub fn with_replica_check_every(mut self, steps: u64) -> Self {
        self.replica_check_every = steps;
        self
    }

    /// Sets whether the [replica check](Self::with_replica_check_every) also compares weights as
    /// they are stored: shards between replicas (HSDP), and parameters placed `Replicate` between
    /// the ranks that shard. A shard that only one rank holds cannot be compared. Default: false.
    /// The value must be equal on all ranks.
    ///
    /// With true, an error in a stored weight of one replica is found, which gradients do not show.
    /// Use it if all replicas run on processors of one kind with one number of threads. Otherwise
    /// the optimizer may give them other bits, and the run would fail without a fault: those that
    /// multiply matrices or compute sums, such as Muon and Lamb, do.
    pub fn with_weight_check(mut self, weights: bool) -> Self {
        self.weight_check = weights;
        self
    }

    /// Sets the element types in which units compute and reduce, for all units that no pattern of
    /// [`with_mixed_precision_for`](Self::with_mixed_precision_for) matches. The policy must be
    /// equal on all ranks.
    ///
    /// Inputs and outputs are cast where a unit's forward begins and ends, which is where the
    /// program opens it with [`unit`](fn@super::unit). A unit that a read opens has no such point:
    /// its weights and gradients follow the policy, but its activations are not cast. This is
    /// correct with one policy for the model and its units, because the model's inputs are cast.
    ///
    /// A module that is not an FSDP unit casts nothing. This includes a model whose parameters are
    /// all in inner units. Buffers, such as running statistics, are not cast.
    pub fn with_mixed_precision(mut self, policy: MixedPrecisionPolicy) -> Self {
        self.precision = policy;
        self
    }

    /// Sets the policy of the units whose module path matches a pattern. If several calls match a
    /// unit, the last one applies.
    pub fn with_mixed_precision_for<S: Into<String>>(
        mut self,
        patterns: impl IntoIterator<Item = S>,
        policy: MixedPrecisionPolicy,
    ) -> Self {
        self.precision_for
            .push((patterns.into_iter().map(Into::into).collect(), policy));
        self
    }

    /// Sets the memory in which shards are stored, for all units that no pattern of
    /// [`with_offload_for`](Self::with_offload_for) matches. The policy must be equal on all ranks.
    ///
    /// With [`OffloadPolicy::Cpu`], shards, their gradients and therefore the optimizer state are
    /// in host memory. The device holds only activations and the weights of open units. A unit's
    /// shards are gathered in host memory, and its weights are copied to the device, in forward and
    /// a second time in backward. Reduced gradients are copied back while the next ones are
    /// computed. A single rank also copies its weights to the device and frees them.
    /// [`Ledger::host_copies`](crate::comm::Ledger::host_copies) counts the bytes, by unit. cubecl
    /// decides which memory is pinned: memory that receives data from the device is, and small
    /// writes to the device go through pinned memory.
    ///
    /// The model may be created on the rank's device, or on the CPU if it is too large for the
    /// device. All its tensors except float parameters are then moved to the device;
    /// [ignored](Self::with_ignored) parameters stay where they are. Operations on stored values
    /// run on the CPU: [`full_model`](super::full_model), shards and gradients of parameters,
    /// records, [`clip_grad_norm`](super::clip_grad_norm), [`GradScaler`](super::GradScaler), and
    /// the [states](crate::optim) of optimizers.
    ///
    /// If ranks compute on the CPU, there is no other memory. Weights are then copies of the
    /// gathered values, and are counted as with a device. This shows which copies a program would
    /// make, and saves nothing.
    ///
    /// ```
    /// # use burn_dtensor::fsdp::{FullyShard, OffloadPolicy};
    /// // Only the first blocks.
    /// let config = FullyShard::new().with_units(["blocks.*"]).with_offload_for(["blocks.[0-3]"], OffloadPolicy::Cpu);
    /// ```
    ///
    /// # Errors
    /// [`fully_shard`](super::fully_shard) returns [`FsdpError::NoHost`](super::FsdpError::NoHost)
    /// in a build without the feature `flex`.
    pub fn with_offload(mut self, offload: OffloadPolicy) -> Self {
        self.offload = offload;
        self
    }

    /// Sets the policy of the units whose module path matches a pattern. If several calls match a
    /// unit, the last one applies.
    pub fn with_offload_for<S: Into<String>>(
        mut self,
        patterns: impl IntoIterator<Item = S>,
        offload: OffloadPolicy,
    ) -> Self {
        self.offload_for
            .push((patterns.into_iter().map(Into::into).collect(), offload));
        self
    }

    /// Sets the policy by which [`sync_buffers`](super::sync_buffers) and
    /// [`full_model`](super::full_model) make running statistics, such as a batch norm's, equal on
    /// all ranks.
    pub fn with_buffer_sync(mut self, buffers: BufferSync) -> Self {
        self.buffer_sync = buffers;
        self
    }

    /// Chooses the placement of each parameter by a function.
    ///
    /// The function may return:
    ///
    /// * `Shard(dim)` for any dimension, divisible or not,
    /// * [`ParamPlacement::uneven`] with a shard size for each rank,
    /// * `Replicate`, for a parameter that every rank holds in full and whose gradient is
    ///   all-reduced,
    /// * any of these over other mesh dimensions ([`ParamPlacement::with_mesh_dims`]),
    /// * `None` for the default. The default is `Shard(0)`, except for parameters whose stored
    ///   shape burn's layers read in forward: `Replicate` for `gamma` of `BatchNorm` and `RmsNorm`,
    ///   `Shard(1)` for `linear_inner.weight` of `PositionWiseFeedForward`.
    ///
    /// Every rank must return the same.
    ///
    /// ```
    /// # use burn_dtensor::fsdp::{FullyShard, ParamInfo, ParamPlacement};
    /// // The second of three ranks has less memory.
    /// let config = FullyShard::new().with_shard_placement_fn(|param: ParamInfo| {
    ///     (param.shape[0] == 100).then(|| ParamPlacement::uneven(0, [40, 20, 40]))
    /// });
    /// ```
    pub fn with_shard_placement_fn<P: Into<ParamPlacement>>(
        mut self,
        placement: impl Fn(ParamInfo<'_>) -> Option<P> + Send + Sync + 'static,
    ) -> Self {
        self.placement = Some(PlacementFn(Arc::new(move |param| {
            placement(param).map(Into::into)
        })));
        self
    }
}
