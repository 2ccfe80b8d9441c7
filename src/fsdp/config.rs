//! [`FullyShard`]: what to shard, how, and when to free it.

use std::fmt;
use std::sync::Arc;

use super::MixedPrecisionPolicy;
use crate::mesh::DimNames;
use crate::param::{BufferSync, OffloadPolicy, ReshardAfterForward};
use crate::placement::Placement;

/// The parameter a shard-placement function decides about.
#[derive(Debug, Clone, Copy)]
pub struct ParamInfo<'a> {
    /// Full path in the model, such as `blocks.0.attention.query.weight`.
    pub path: &'a str,
    /// Its shape: of a parallelized one, that of this rank's tensor-parallel shard.
    pub shape: &'a [usize],
}

/// How a parameter lies on the ranks that shard: what a shard-placement function returns.
///
/// Any [`Placement`] is one. [`uneven`](Self::uneven) says beside it what each rank holds,
/// [`with_mesh_dims`](Self::with_mesh_dims) which ranks shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamPlacement {
    pub(super) placement: Placement,
    /// Of a shard that is no chunk.
    pub(super) lengths: Option<Arc<[usize]>>,
    /// The mesh dimensions that shard, if not those of the call.
    pub(super) over: Option<Vec<String>>,
}

impl ParamPlacement {
    /// `Shard(dim)` of which each rank of the mesh dimension that shards holds one of these lengths,
    /// possibly 0. They add up to the length of `dim`.
    pub fn uneven(dim: usize, lengths: impl Into<Arc<[usize]>>) -> Self {
        Self { placement: Placement::Shard(dim), lengths: Some(lengths.into()), over: None }
    }

    /// On a mesh of its own: cut over these data-parallel dimensions of the mesh alone. The others replicate it, but
    /// for those that [`parallelize`](crate::parallel::parallelize) has placed it over.
    ///
    /// ```
    /// # use burn_dtensor::fsdp::{FullyShard, ParamInfo, ParamPlacement};
    /// # use burn_dtensor::placement::Placement;
    /// // Embeddings lie on every node, cut over its ranks; all else is cut over all ranks.
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
        Self { placement, lengths: None, over: None }
    }
}

fn owned(names: impl DimNames) -> Vec<String> {
    names.dim_names().into_iter().map(Into::into).collect()
}

type PlacementFn = Arc<dyn Fn(ParamInfo<'_>) -> Option<ParamPlacement> + Send + Sync>;

/// Configuration of [`fully_shard`](super::fully_shard).
///
/// ```
/// # use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward};
/// let config = FullyShard::new()
///     .with_units(["blocks.*"])
///     .with_reshard_after_forward(ReshardAfterForward::Always);
/// ```
#[derive(Clone)]
pub struct FullyShard {
    pub(super) units: Vec<String>,
    /// Patterns of the modules of each unit of several.
    pub(super) groups: Vec<Vec<String>>,
    pub(super) ignored: Vec<String>,
    pub(super) reshard: ReshardAfterForward,
    pub(super) implicit_unshard: bool,
    pub(super) buffer_sync: BufferSync,
    pub(super) placement: Option<PlacementFn>,
    /// Names of mesh dimensions.
    pub(super) shard_dims: Vec<String>,
    pub(super) replicate_dims: Vec<String>,
    pub(super) balanced: bool,
    pub(super) replica_check_every: u64,
    pub(super) precision: MixedPrecisionPolicy,
    /// Of units by pattern.
    pub(super) precision_for: Vec<(Vec<String>, MixedPrecisionPolicy)>,
    pub(super) offload: OffloadPolicy,
    /// Of units by pattern.
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
            placement: None,
            shard_dims: Vec::new(),
            replicate_dims: Vec::new(),
            balanced: false,
            replica_check_every: 10,
            precision: MixedPrecisionPolicy::default(),
            precision_for: Vec::new(),
            offload: OffloadPolicy::default(),
            offload_for: Vec::new(),
        }
    }
}

impl FullyShard {
    /// One unit holding every parameter, [`ReshardAfterForward::Auto`], placement `Shard(0)`,
    /// [`BufferSync::FirstRank`], [`with_replica_check_every(10)`](Self::with_replica_check_every).
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a unit of every module whose path matches a pattern.
    ///
    /// A pattern is a path whose parts may hold `*`, `?` and `[0-9]`; `**` spans parts. Parameters
    /// that no pattern takes belong to the root unit.
    pub fn with_units<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.units.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Makes one unit of all modules whose path matches one of these patterns: small ones that would each be a
    /// collective, or two that are far apart and to be gathered together. Each call makes one.
    ///
    /// Where a forward that is open around them all, by [`unit`](fn@super::unit), comes to the first, it gathers the
    /// parameters of all, and frees them when each has run, or with the module in which the first was opened. So what
    /// runs between is inside the unit, and a module that never runs costs nothing but that its parameters stay until
    /// then. With nothing around them each gathers its own.
    ///
    /// ```
    /// # use burn_dtensor::fsdp::FullyShard;
    /// let config = FullyShard::new().with_units(["blocks.*"]).with_group_unit(["norm", "head"]);
    /// ```
    pub fn with_group_unit<S: Into<String>>(mut self, modules: impl IntoIterator<Item = S>) -> Self {
        self.groups.push(modules.into_iter().map(Into::into).collect());
        self
    }

    /// Leaves the parameters whose path matches a pattern as they are, neither sharded nor reduced, and with
    /// all parameters of a module its buffers.
    ///
    /// Of a weight with an adapter (LoRA) `layer.weight` is the stored value alone; the adapter's parameters have paths
    /// of their own, such as `layer.weight.lora.a`.
    pub fn with_ignored<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.ignored.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Shards over these dimensions of the mesh, which has others too: all their ranks together, the last dimension
    /// varying fastest, as over one. Names are in the mesh's order.
    ///
    /// Without it a 1-D mesh shards, and of a 2-D mesh the second dimension.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn_dtensor::prelude::*;
    /// launch(Launch::threads(8), |world| {
    ///     // Data parallel over `dp`, context parallel over `cp`: both have tokens of their own.
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

    /// Replicates over these dimensions of the mesh (HSDP), beside those that
    /// [`with_shard_dims`](Self::with_shard_dims) names. Dimensions that neither names have no part.
    pub fn with_replicate_dims(mut self, dims: impl DimNames) -> Self {
        self.replicate_dims = owned(dims);
        self
    }

    /// Cuts parameters such that all ranks hold as many bytes of a unit: no two of them are more than one row apart,
    /// the largest of the unit. Without it each parameter is cut in chunks, of which the last ranks hold less or
    /// nothing: of 9 rows 8 ranks hold 2, 2, 2, 2, 1, 0, 0 and 0.
    ///
    /// ```text
    /// weight [5, 3] and bias [4] over 3 ranks     weight's rows      bias'     numbers on each rank
    /// in chunks                                   2 + 2 + 1          2 + 2 + 0    8 + 8 + 3
    /// balanced                                    2 + 2 + 1          1 + 0 + 3    7 + 6 + 6
    /// ```
    ///
    /// Rows are along the dimension that the placement cuts, [`ParamPlacement::uneven`] stays as it is. So does a
    /// parameter along a dimension of which tensor-parallel ranks have parts of unequal lengths.
    pub fn with_balanced_bytes(mut self) -> Self {
        self.balanced = true;
        self
    }

    /// Sets when gathered parameters are freed.
    pub fn with_reshard_after_forward(mut self, reshard: ReshardAfterForward) -> Self {
        self.reshard = reshard;
        self
    }

    /// Sets whether a parameter may be read outside its unit ([`unit`](fn@super::unit) says what that is). If so, which
    /// is the default, such parameters are gathered and reduced one by one, and a warning names the first of each unit.
    /// With `false` every rank that reads one gets
    /// [`ParamError::ReadOutsideUnit`](crate::param::ParamError::ReadOutsideUnit).
    pub fn with_implicit_unshard(mut self, implicit: bool) -> Self {
        self.implicit_unshard = implicit;
        self
    }

    /// Compares, in every so-manieth step, what several ranks hold alike: to the bit, by a digest of 64 bits that
    /// travels with a unit's reductions. A difference is [`CommError::Diverged`](crate::comm::CommError::Diverged) on
    /// all ranks, which names two that differ, the parameter and the step; of three or more that hold it, the one at
    /// fault. So a host whose memory or processor is broken is found before what it computes has spread for long; with
    /// 1, in the backward of the step in which it is wrong. Default: 10; 0 never compares. It must be equal on all
    /// ranks.
    ///
    /// Compared are, of each unit that trains a parameter: between replicas (HSDP) the stored shards and their averaged
    /// gradients; between the ranks that shard, parameters placed `Replicate`, their averaged gradients, and the
    /// weights that forward has gathered. Of a shard that one rank alone holds there is nothing to compare with.
    /// Gradients are compared with the next reduction of any unit.
    ///
    /// What was wrong for some steps has spread, by gradients that were averaged with it: who is named holds the wrong
    /// value, and may have it from elsewhere.
    ///
    /// Steps are a unit's passes, however many are made before the optimizer steps, counted from 1 as forward begins
    /// with autodiff.
    ///
    /// On devices other than the CPU values are not looked at; [offloaded](Self::with_offload) shards are. Optimizers
    /// that multiply matrices or sum up, such as Muon and Lamb, give equal bits on processors of one kind with one
    /// number of threads alone: where replicas have others, say 0.
    pub fn with_replica_check_every(mut self, steps: u64) -> Self {
        self.replica_check_every = steps;
        self
    }

    /// Sets the element types that units compute and reduce in: of all that
    /// [`with_mixed_precision_for`](Self::with_mixed_precision_for) does not take. Must be equal on all ranks.
    ///
    /// Inputs and outputs are cast where a unit's forward begins and ends, so where the program opens it by
    /// [`unit`](fn@super::unit). A unit that a read opens has no such place: its weights and gradients follow the
    /// policy, and activations are as its module is given them. With one policy for the model and its units that is
    /// right, for the model's own inputs are cast.
    ///
    /// A module that is no unit casts nothing, so neither does a model whose parameters are all in units inside.
    /// Buffers, such as running statistics, stay as they are.
    pub fn with_mixed_precision(mut self, policy: MixedPrecisionPolicy) -> Self {
        self.precision = policy;
        self
    }

    /// Sets those of the units whose module's path matches a pattern; of several calls that take a unit, the last
    /// counts.
    pub fn with_mixed_precision_for<S: Into<String>>(
        mut self,
        patterns: impl IntoIterator<Item = S>,
        policy: MixedPrecisionPolicy,
    ) -> Self {
        self.precision_for.push((patterns.into_iter().map(Into::into).collect(), policy));
        self
    }

    /// Sets where shards are, of all units that [`with_offload_for`](Self::with_offload_for) does not take. Must be
    /// equal on all ranks.
    ///
    /// With [`OffloadPolicy::Cpu`] shards, their gradients and so what an optimizer remembers are in host memory, and
    /// the device holds the weights of open units and activations alone. A unit's shards are gathered there, and its
    /// weights copied to the device, in forward and again in backward; reduced gradients are copied back while the next
    /// ones are computed. A rank alone copies its weights in and frees them, too.
    /// [`Ledger::host_copies`](crate::comm::Ledger::host_copies) counts the bytes, by unit. Pages are pinned as cubecl
    /// does it: what it reads is, and what is written by way of pinned memory if it is small.
    ///
    /// The model may be made on the rank's device, or on the CPU where it is too large for that. Everything beside its
    /// float parameters then goes to the device, but for parameters that are [ignored](Self::with_ignored), which stay
    /// where they are. What reads stored values is on the CPU with them: [`full_model`](super::full_model), shards and
    /// gradients of parameters, records, [`clip_grad_norm`](super::clip_grad_norm), [`GradScaler`](super::GradScaler),
    /// and the [states](crate::optim) of optimizers.
    ///
    /// Where ranks compute on the CPU there is no other memory: weights are copies of what was gathered, and are
    /// counted, as with a device. That shows what a program would copy, and saves nothing.
    ///
    /// ```
    /// # use burn_dtensor::fsdp::{FullyShard, OffloadPolicy};
    /// // The first blocks alone.
    /// let config = FullyShard::new().with_units(["blocks.*"]).with_offload_for(["blocks.[0-3]"], OffloadPolicy::Cpu);
    /// ```
    ///
    /// # Errors
    /// Of [`fully_shard`](super::fully_shard): [`FsdpError::NoHost`](super::FsdpError::NoHost) in a build without the
    /// feature `flex`.
    pub fn with_offload(mut self, offload: OffloadPolicy) -> Self {
        self.offload = offload;
        self
    }

    /// Sets those of the units whose module's path matches a pattern; of several calls that take a unit, the last
    /// counts.
    pub fn with_offload_for<S: Into<String>>(
        mut self,
        patterns: impl IntoIterator<Item = S>,
        offload: OffloadPolicy,
    ) -> Self {
        self.offload_for.push((patterns.into_iter().map(Into::into).collect(), offload));
        self
    }

    /// Sets which running statistics, such as a batch norm's, all ranks get when
    /// [`sync_buffers`](super::sync_buffers) or [`full_model`](super::full_model) makes them equal.
    pub fn with_buffer_sync(mut self, buffers: BufferSync) -> Self {
        self.buffer_sync = buffers;
        self
    }

    /// Chooses the dimension each parameter is cut along, and how.
    ///
    /// `Shard(dim)` on any dimension, even or not; [`ParamPlacement::uneven`], where each rank is told
    /// what it holds; or `Replicate`, for a parameter every rank keeps whole and whose gradient is
    /// all-reduced; each over other mesh dimensions too ([`ParamPlacement::with_mesh_dims`]). Every rank must return
    /// the same. `None` is `Shard(0)`, but for the parameters whose stored shape burn's layers read in forward:
    /// `Replicate` for `gamma` of `BatchNorm` and `RmsNorm`, `Shard(1)` for `linear_inner.weight` of
    /// `PositionWiseFeedForward`.
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
        self.placement = Some(Arc::new(move |param| placement(param).map(Into::into)));
        self
    }
}

impl fmt::Debug for FullyShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullyShard")
            .field("units", &self.units)
            .field("group_units", &self.groups)
            .field("ignored", &self.ignored)
            .field("shard_dims", &self.shard_dims)
            .field("replicate_dims", &self.replicate_dims)
            .field("reshard_after_forward", &self.reshard)
            .field("implicit_unshard", &self.implicit_unshard)
            .field("buffer_sync", &self.buffer_sync)
            .field("balanced", &self.balanced)
            .field("replica_check_every", &self.replica_check_every)
            .field("mixed_precision", &self.precision)
            .field("mixed_precision_for", &self.precision_for)
            .field("offload", &self.offload)
            .field("offload_for", &self.offload_for)
            .field("shard_placement_fn", &self.placement.is_some())
            .finish()
    }
}
