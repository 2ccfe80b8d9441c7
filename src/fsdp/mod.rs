//! Fully sharded data parallelism (FSDP): trains ordinary burn modules whose parameters, gradients
//! and optimizer states are sharded over ranks.
//!
//! [`fully_shard`] replaces each parameter by this rank's shard; layers still read the full
//! parameter. Path patterns name the modules whose parameters are gathered and freed together, and
//! [`unit`](fn@unit) marks the forward of such a module:
//!
//! ```
//! # use burn::nn::{Linear, LinearConfig};
//! # use burn::optim::{AdamWConfig, GradientsParams};
//! # use burn::tensor::Tensor;
//! use burn_dtensor::optim::sharded;
//! use burn_dtensor::prelude::*;
//!
//! launch(Launch::threads(4), |world| {
//!     let mesh = DeviceMesh::new(world, [4], ["shard"])?;
//!     let device = world.device().clone().autodiff();
//!     let layers: Vec<Linear> = (0..3).map(|_| LinearConfig::new(16, 16).init(&device)).collect();
//!     let mut layers = fully_shard(layers, &mesh, FullyShard::new().with_units(["*"]))?;
//!     assert_eq!(layers[0].weight.base().dims(), [4, 16]); // this rank's shard of [16, 16]
//!
//!     let mut optim = sharded(AdamWConfig::new());
//!     for _ in 0..3 {
//!         let x = Tensor::<2>::ones([8, 16], &device); // the rows of this rank
//!         let y = unit(&layers, x, |layers, x| {
//!             layers.iter().fold(x, |x, layer| unit(layer, x, |layer, x| layer.forward(x).tanh()))
//!         });
//!         let grads = GradientsParams::from_grads(y.square().mean().backward(), &layers);
//!         layers = optim.step(1e-2, layers, grads)?; // burn's AdamW, on the shards
//!     }
//!     let full = full_model(&layers)?; // ordinary layers on every rank
//!     assert_eq!(full[0].weight.val().dims(), [16, 16]);
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! Options of [`FullyShard`]:
//!
//! | option | sets | default |
//! |---|---|---|
//! | [`with_units`](FullyShard::with_units), [`with_group_unit`](FullyShard::with_group_unit) | modules whose parameters are gathered together, by path patterns | one unit with all parameters |
//! | [`with_reshard_after_forward`](FullyShard::with_reshard_after_forward) | [when](#when-units-are-freed) unsharded parameters are freed | after forward, except the root unit's |
//! | [`with_mixed_precision`](FullyShard::with_mixed_precision), [`with_mixed_precision_for`](FullyShard::with_mixed_precision_for) | [element types](#mixed-precision) of computations and reductions | as the values are stored |
//! | [`with_offload`](FullyShard::with_offload), [`with_offload_for`](FullyShard::with_offload_for) | [memory](#memory) of the shards | memory of the device |
//! | [`with_shard_dims`](FullyShard::with_shard_dims), [`with_replicate_dims`](FullyShard::with_replicate_dims) | [mesh dimensions](#meshes-of-several-dimensions) that shard and that replicate | a 1-D mesh shards; a 2-D mesh replicates over its first dimension and shards over its second (HSDP) |
//! | [`with_shard_placement_fn`](FullyShard::with_shard_placement_fn), [`with_balanced_bytes`](FullyShard::with_balanced_bytes) | placement of each parameter, and the shard sizes | `Shard(0)` in chunks, except for the few parameters whose stored shape burn's layers read |
//! | [`with_ignored`](FullyShard::with_ignored) | parameters that are neither sharded nor reduced | none |
//! | [`with_implicit_unshard`](FullyShard::with_implicit_unshard) | permission to read a parameter outside its unit | allowed, with a warning |
//! | [`with_buffer_sync`](FullyShard::with_buffer_sync) | policy by which running statistics are made equal | values of the first rank |
//! | [`with_replica_check_every`](FullyShard::with_replica_check_every), [`with_weight_check`](FullyShard::with_weight_check) | comparison of values that must be identical on several ranks | every 10 steps, without stored parameters |
//! | [`with_layer_warnings`](FullyShard::with_layer_warnings), [`with_dropout_warning`](FullyShard::with_dropout_warning) | warnings about layers that compute something else on several ranks | on |
//!
//! Functions for the sharded model:
//!
//! | purpose | use |
//! |---|---|
//! | see which rank holds what | [`describe`](describe()), [`named_parameters`] |
//! | compare the sharded model with the full one | [`compare`](compare()): runs one batch through both, and names the first unit and the parameters that differ |
//! | read a parameter's shard, or its gradient's | [`ParamExt`] |
//! | clip gradients by their joint norm | [`clip_grad_norm`] |
//! | accumulate gradients, or change options of units at run time | [`FsdpModule`] |
//! | recompute activations in backward | [`checkpoint_activations`] |
//! | make running statistics equal, before evaluation | [`sync_buffers`] |
//! | get an ordinary model, on every rank or on one | [`full_model`], [`full_model_on`] |
//! | save and resume | [`checkpoint`](crate::checkpoint) |
//! | continue on the ranks that survive a failure | [`remesh`] |
//! | compress, count or replace what units send | [`ShardCodec`], [`UnitCollectives`] |
//!
//! # Optimizers
//! burn's optimizers step shards. An optimizer that works element by element gives the same result
//! as on full parameters. One that needs a full parameter, or all parameters, sees only shards.
//! `tests/suite/fsdp/optimizers.rs` checks this table on 2 and 3 ranks with uneven shards on Flex.
//! It covers every configuration of an optimizer that changes the computation, and "equal" means
//! bit for bit:
//!
//! | optimizer | on shards | why |
//! |---|---|---|
//! | `Sgd` | equal | with momentum (also Nesterov's) and weight decay |
//! | `Adam` | equal | with AMSGrad and weight decay |
//! | `AdamW` | equal | with AMSGrad and cautious weight decay |
//! | `AdaGrad` | equal | with decaying rates and weight decay |
//! | `RmsProp` | equal | centered or not, with weight decay |
//! | `Adan` | equal | with weight decay, by the proximal step or not |
//! | `Lion` | equal | with weight decay |
//! | `GradientClipping::Value` | equal | works element by element |
//! | `GradientClipping::Norm` | different | norm of one parameter's shard; [`clip_grad_norm`] uses the norm of all |
//! | `Lamb` | different | scales steps by the norm of each parameter |
//! | `Adafactor` | different | uses means over rows, columns and all elements of a parameter |
//! | `Muon` | different | orthogonalizes the step of a full parameter, and scales it by the parameter's shape |
//! | `LBFGS` | different | uses products of vectors of all parameters, and the loss of a single rank |
//!
//! [`optim::sharded`](crate::optim::sharded) accepts only the equal ones, and has correct versions
//! of clipping by norm and of `Muon`. [`optim`](crate::optim) also saves and loads optimizer
//! states, by path and for any mesh.
//!
//! # Units
//! [`fully_shard`] attaches a reparameterization to every parameter: the stored value is this
//! rank's shard, and layers read the full parameter. Parameters are gathered and reduced in
//! **units**: one all-gather moves all parameters of a unit, and one reduce-scatter its gradients. [`unit`](fn@unit) marks the
//! beginning and the end of a unit's forward. Units of inner modules can also be opened by the
//! first read of a parameter.
//!
//! ```text
//! forward    root: all-gather │ block 0: all-gather, compute, free │ block 1: ... │ head
//! backward   head │ block 1: all-gather, gradients, reduce-scatter, free │ block 0: ... │ root: reduce-scatter
//! optimizer  burn's own, on the shards
//! ```
//!
//! # When units are freed
//! | [`ReshardAfterForward`] | between forward and backward | all-gathers of a step |
//! |---|---|---|
//! | [`Auto`](ReshardAfterForward::Auto) | freed, except the root unit | two for each unit, one for the root |
//! | [`Always`](ReshardAfterForward::Always) | freed | two for each unit |
//! | [`Never`](ReshardAfterForward::Never) | kept | one for each unit |
//! | [`Ranks(n)`](ReshardAfterForward::Ranks) | sharded over `n` neighbouring ranks | two for each unit, the second over `n` ranks |
//!
//! # Meshes of several dimensions
//! [`FullyShard::with_shard_dims`] and [`FullyShard::with_replicate_dims`] name the mesh dimensions
//! that shard and that replicate. Several dimensions act as one. Tensor parallelism uses other
//! dimensions, in any order.
//!
//! A parameter may be on a separate mesh. Its placement can shard it over fewer dimensions
//! ([`ParamPlacement::with_mesh_dims`]); the others then replicate it. Or it may already be placed
//! over some of the data-parallel dimensions, as experts are:
//! [`parallelize`](crate::parallel::parallelize) places the stacked weights of all experts as
//! `Shard(0)` over a data-parallel dimension `ep`, and `fully_shard` shards them over the remaining
//! ones:
//!
//! ```
//! # use burn::module::{Module, Param};
//! # use burn::nn::{Linear, LinearConfig};
//! # use burn::tensor::{Distribution, Tensor};
//! # use burn_dtensor::prelude::*;
//! # #[derive(Module, Debug)]
//! # struct Experts { up: Param<Tensor<3>> }
//! # #[derive(Module, Debug)]
//! # struct Block { router: Linear, experts: Experts }
//! fn shard(mut block: Block, mesh: &DeviceMesh) -> Result<Block> {
//!     let by_expert = Plan::new().with_style("*", Style::placed(Placement::Shard(0)));
//!     block.experts = parallelize(block.experts, &mesh.slice("ep")?, by_expert)?;
//!     fully_shard(block, mesh, FullyShard::new().with_shard_dims(["efsdp", "ep"]))
//! }
//! # launch(Launch::threads(4), |world| {
//! # let device = world.device().clone();
//! let mesh = DeviceMesh::new(world, [2, 2], ["efsdp", "ep"])?;
//! # let block = Block {
//! #     router: LinearConfig::new(16, 8).init(&device),
//! #     experts: Experts { up: Param::from_tensor(Tensor::random([8, 16, 32], Distribution::Default, &device)) },
//! # };
//! let block = shard(block, &mesh)?; // a router of [16, 8], and 8 experts of [16, 32]
//! assert_eq!(block.router.weight.base().dims(), [4, 8]); // over all four ranks
//! assert_eq!(block.experts.up.base().dims(), [2, 16, 32]); // over `efsdp`: half of the 4 experts of a rank along `ep`
//! assert_eq!(block.experts.up.dtensor()?.local().dims(), [4, 16, 32]);
//! # Ok(())
//! # })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! If the parameters of a unit are on several meshes, there is one unit per mesh. These units are
//! entered together, and each has its collectives over its own ranks.
//!
//! Ranks along `ep` have distinct tokens, so each rank computes the loss of its own tokens. A token
//! is sent to the rank of its expert as a [`DTensor`](crate::dtensor::DTensor): the redistribution
//! from `Shard` of tokens to `Shard` of experts is an all-to-all, and so is the way back. In
//! backward, this all-to-all sums the gradient of an expert over all ranks along `ep`. The unit
//! sums it over `efsdp`, and divides by the number of all data-parallel ranks, not only by those
//! that it reduces over. The result is the gradient of the mean of all ranks' losses, as for any
//! other parameter (torchtitan's `gradient_divide_factor`). Experts that are read in full, with
//! [`val`](burn::module::Param::val), have the same gradient, because it is reduced over `ep` as
//! well.
//!
//! # Mixed precision
//! [`FullyShard::with_mixed_precision`] sets the element types in which units compute and reduce, for
//! example `bf16` or `f16` and `f32`, while the optimizer steps `f32` shards. Without a type for
//! reductions, gradients are reduced in the type in which their parameter is stored. [`GradScaler`]
//! scales the loss of models that compute in `f16`, whose small gradients would vanish otherwise.
//!
//! # Memory
//! Between forward and backward a freed unit holds only its shards, whatever the graph has saved:
//! the unsharded parameters are in evictable storage, which the unit can free while views of it
//! exist. On a GPU, this applies only to units of one module that [`unit`](fn@unit) has opened,
//! without burn's fusion. In other units on a GPU, a view of a parameter that the graph has saved
//! keeps the unsharded unit until backward. burn's layers save such views for inputs of three
//! dimensions. A parameter that is read outside its unit's scope is freed when the graph drops it.
//! So is the full value of a parallelized parameter that is read with
//! [`val`](burn::module::Param::val). To compute with the rank's tensor-parallel shard, read it with
//! [`dtensor`](ParamExt::dtensor).
//!
//! With [`FullyShard::with_offload`] the shards are in host memory, and so are gradients and
//! optimizer states. The device holds only activations and the parameters of open units. If
//! ranks compute on the CPU, this saves no memory.
//!
//! To keep the order of reductions (invariant 6), a rank may have to hold gradients back. Inside a
//! unit that encloses others, it never does. Units without an enclosing unit may belong to two
//! losses. So if a model has two parallel towers of such units, the gradients of one tower are held
//! until the other is complete: for two towers of 32 blocks, 11 more blocks' gradients were measured
//! than with an enclosing unit. Open a unit around the model with `unit` to avoid this.
//!
//! # Invariants
//! 1. The optimizer, records and gradients see shards only. The model's type and parameter paths
//!    never change.
//! 2. A unit makes one all-gather in forward, one in backward if its parameters were freed between,
//!    and one reduce-scatter. Its only other collectives are HSDP's all-reduce of the reduced
//!    shards, one all-reduce if it has parameters placed `Replicate`, and the all-reduces of
//!    partial gradients over tensor-parallel ranks ([`parallel`](crate::parallel), invariant 3):
//!    one for each set of mesh dimensions along which gradients are partial. In addition to the
//!    gradients, a reduction transfers one flag per parameter, which says that the rank has used
//!    it. Values that must be identical on several ranks are
//!    [compared](FullyShard::with_replica_check_every) by digests in the signatures of reductions.
//! 3. Gradients are averages over all data-parallel ranks, unless [`FsdpModule`] sets another
//!    divisor, a weight or a hook, or postpones the reduction to a later backward. On groups whose
//!    size is a power of two, data parallelism, FSDP and HSDP agree bit for bit.
//! 4. A parameter that only some ranks use counts as zeros on the others. A parameter that no rank
//!    uses has no gradient, as without sharding. If a unit leaves a tracked input unused, the
//!    operation that made the input receives zeros. A parameter of a unit that receives nothing but
//!    these has no gradient; one that the loss depends on has one, even if it is zero.
//! 5. A failing collective of a forward or backward unwinds the rank with the typed error. A
//!    function that returns a `Result` returns the error.
//! 6. Backward's collectives follow the order of forward, whatever the depth of a rank's graph, so
//!    ranks may have different batches and use different parameters. The all-gathers of backward are
//!    posted when forward leaves a unit, on a separate communicator. Reductions have another
//!    communicator. They run in reverse order of entry; units without a tracked input and without
//!    an enclosing unit follow last, in order of entry. The reduction over the ranks that shard is
//!    waited for before that of the next unit is issued.
//! 7. Values of different models are never combined. Collectives carry the number of the
//!    `fully_shard` call and the states of the parameters. So ranks fail with an error if they run
//!    models of equal shapes in different orders, or clones whose parameters are no longer the
//!    same.

mod balance;
mod by_unit;
mod clip;
mod compare;
mod config;
mod describe;
mod dims;
mod error;
mod fsdp_module;
mod named;
mod plan;
mod powers;
mod precision;
mod remesh;
mod scaler;
mod shard;
mod warnings;

pub use clip::{ClipGradNorm, NormType, clip_grad_norm};
pub use compare::{Cause, Comparison, Finding, Side, compare};
pub use config::{FullyShard, ParamInfo, ParamPlacement};
pub use describe::{Description, describe};
pub use error::FsdpError;
pub use fsdp_module::{FsdpModule, NoSync, Prefetch, UnshardHandle, reshard, unshard};
pub use named::{NamedParameter, named_parameters};
pub use precision::MixedPrecisionPolicy;
pub use remesh::remesh;
pub use scaler::GradScaler;
pub use shard::fully_shard;
pub(crate) use shard::{distribute, origin};

pub use crate::param::{
    BufferSync, DistributedParameter, EncodedShard, Event, EventKind, Grads, OffloadPolicy,
    ParamError, ParamExt, ReducedGradients, ReshardAfterForward, ShardCodec, ShardedState,
    TrainingState, UnitCollectives, checkpoint_activations, full_model, full_model_on,
    record_events, sync_buffers, unit,
};
pub use crate::tensor_tree::{TensorMapFn, TensorTree};
