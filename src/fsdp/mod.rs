//! Fully sharded data parallelism (FSDP): trains a model whose parameters, gradients and optimizer
//! states are sharded over the ranks of a mesh.
//!
//! Each of `n` ranks stores about `1 / n` of all three. Use it for a model that is too large for
//! one device. If the model fits on every device, [`replicate`](crate::replicate) communicates
//! less. The model is an ordinary burn module, and keeps its type and its parameter paths:
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
//! - [`fully_shard`] replaces each parameter by this rank's shard. A layer that reads the parameter
//!   still gets the unsharded one.
//! - [`with_units`](FullyShard::with_units) makes a *unit* of each module whose path matches a
//!   pattern. The parameters of a unit are gathered, reduced and freed together.
//! - [`unit`](fn@unit) marks where the forward of a module begins and ends.
//! - The optimizer steps the shards. It does not communicate.
//!
//! # Units
//! A unit makes one all-gather in forward, one in backward if its parameters were freed in between,
//! and one reduce-scatter of its gradients:
//!
//! ```text
//! forward    root: all-gather │ block 0: all-gather, compute, free │ block 1: ... │ head
//! backward   head │ block 1: all-gather, gradients, reduce-scatter, free │ block 0: ... │ root: reduce-scatter
//! optimizer  burn's own, on the shards
//! ```
//!
//! Make a unit of each large block, such as a transformer layer. All other parameters belong to the
//! root unit, which is the model itself. Write [`unit`](fn@unit) around the model's forward and
//! around the forward of each block. If you cannot change a block's forward, the call around the
//! model is enough: a unit inside it is entered when one of its parameters is first read. The
//! collectives are the same, and so is the memory on the CPU. On a GPU, such a unit may stay
//! unsharded until backward. Mixed precision does not cast its inputs and outputs. Without any call
//! of [`unit`](fn@unit), each parameter is gathered and reduced separately, and may stay unsharded
//! until backward.
//!
//! # Options
//! The options of [`FullyShard`]:
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
//! # Functions for the sharded model
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
//! # When units are freed
//! | [`ReshardAfterForward`] | between forward and backward | all-gathers of a step |
//! |---|---|---|
//! | [`Auto`](ReshardAfterForward::Auto) | freed, except the root unit | two for each unit, one for the root |
//! | [`Always`](ReshardAfterForward::Always) | freed | two for each unit |
//! | [`Never`](ReshardAfterForward::Never) | kept | one for each unit |
//! | [`Ranks(n)`](ReshardAfterForward::Ranks) | sharded over `n` neighbouring ranks | two for each unit, the second over `n` ranks |
//!
//! # Memory
//! If `n` ranks shard the model, a rank holds:
//!
//! | time | parameters | gradients |
//! |---|---|---|
//! | before [`fully_shard`] | the full model; of lazy parameters nothing | |
//! | between two steps | the shards: `1 / n` | |
//! | in a unit's forward | the shards; unsharded, this unit and the units around it | |
//! | between forward and backward | the shards; unsharded, the units that are [not freed](#when-units-are-freed) | |
//! | in a unit's backward | the shards; unsharded, this unit and the units around it | unsharded, this unit's, and the gradients of the previous unit, which are being reduced; the shards of all units whose reduction is complete |
//! | after backward, until the step | the shards | the shards: `1 / n` |
//!
//! The optimizer's state is sharded at all times. In addition, a rank holds its activations, its
//! buffers, and the full value and gradient of each parameter that is placed `Replicate`. With
//! [`Ranks(m)`](ReshardAfterForward::Ranks), it keeps `1 / m` of each unit between forward and
//! backward.
//!
//! - **Peak.** Beyond shards, their gradients and activations, backward needs at most four times
//!   the memory of a unit, however many units the model has. With HSDP and a late rank, a shard of
//!   a unit is added. So smaller units lower the peak. `tests/memory` checks these bounds for ranks
//!   that are threads; it measures 2.8 units, and 3.8 with a late rank.
//! - **AdamW in `f32`.** Between steps a rank holds three times its shards: values and two moments.
//!   At the end of backward, gradients make it four times.
//!   [`ShardedOptimizer::backward`](crate::optim::ShardedOptimizer::backward) steps parameters
//!   during backward, so that it stays at three times, plus the gradients of two units, or of three
//!   with a late rank. `tests/memory` measures 4.2 and 3.3 times for each further layer, including
//!   activations.
//! - **Prefetch.** Between processes, the next unit is gathered while the current one computes, so
//!   one more unit is unsharded. Threads transfer a unit only when it is entered.
//! - **Threads.** On the CPU, the ranks of one process share one copy of an unsharded parameter.
//! - **Initial values.** A parameter that is lazy is drawn in [`fully_shard`], on the first rank
//!   only, and sent as shards before the next one is drawn. No rank ever holds more than one
//!   unsharded parameter.
//! - **Accumulation.** Gradients that wait for a later reduction are unsharded: as large as the
//!   model. See [`FsdpModule::set_requires_gradient_sync`].
//! - **Mixed precision.** Unsharded parameters take the bytes of their computation type. Between
//!   forward and backward, a rank also holds its shards in that type, for the all-gather in
//!   backward.
//! - **[`full_model`]** holds the full model on every rank. [`full_model_on`] holds it on one rank;
//!   every other rank holds one unsharded unit at a time.
//! - **Activations** are not sharded. [`checkpoint_activations`] recomputes them in backward, and
//!   [tensor parallelism](crate::parallel) shards them.
//!
//! With [`FullyShard::with_offload`], shards, their gradients and the optimizer's state are in host
//! memory. The device holds only activations and the parameters of open units. If ranks compute on
//! the CPU, this saves no memory.
//!
//! **What freeing needs.** burn's autodiff graph may keep views of an unsharded parameter, as
//! burn's layers do for inputs of three dimensions. A unit frees the memory under such views when
//! forward leaves it, and fills it in backward. On the CPU, every unit can do so. On a GPU, only a
//! unit of one module that [`unit`](fn@unit) has opened can, and burn's fusion must be off. Any
//! other unit on a GPU stays in memory until backward if the graph keeps a view.
//!
//! Two kinds of values are freed only when the graph drops them: a parameter that is read outside
//! its unit, and the full value of a parallelized parameter that is read with
//! [`val`](burn::module::Param::val). Read the rank's tensor-parallel shard with
//! [`dtensor`](ParamExt::dtensor) instead.
//!
//! **Held gradients.** To keep the order of reductions (invariant 6), a rank may have to keep a
//! unit's gradients until other units are reduced. This does not happen inside a unit that encloses
//! the others. Without an enclosing unit, two parallel towers may belong to two losses, so the
//! gradients of one tower are held until the other is complete. Write `unit` around the model to
//! avoid this.
//!
//! # Meshes of several dimensions
//! [`FullyShard::with_shard_dims`] and [`FullyShard::with_replicate_dims`] name the mesh dimensions
//! that shard and that replicate. Several dimensions act as one. Tensor parallelism uses other
//! dimensions, in any order.
//!
//! A parameter may be sharded over fewer ranks than the others:
//!
//! - Its placement names fewer dimensions, with [`ParamPlacement::with_mesh_dims`]. The other
//!   data-parallel dimensions replicate it.
//! - It is already placed over a data-parallel dimension. Experts are an example:
//!   [`parallelize`](crate::parallel::parallelize) places the stacked weights of all experts as
//!   `Shard(0)` over a dimension `ep`. `fully_shard` then shards them over the remaining
//!   dimensions:
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
//! If the parameters of a unit are on several meshes, there is one unit for each mesh. These units
//! are entered together, and each has its collectives over its own ranks.
//!
//! Ranks along `ep` have distinct tokens, and each computes the loss of its own tokens. The tokens
//! are a [`DTensor`](crate::dtensor::DTensor). Its redistribution from `Shard` of tokens to `Shard`
//! of experts is an all-to-all, which sends each token to the rank of its expert; a second one
//! returns it. So an expert computes with tokens of all ranks along `ep`, and its gradient is
//! already summed over them. The unit sums the gradient over `efsdp`, and divides by the number of
//! all data-parallel ranks. The result is the gradient of the mean of all ranks' losses, as for any
//! other parameter (torchtitan: `gradient_divide_factor`). Experts that are read in full, with
//! [`val`](burn::module::Param::val), have the same gradient, because it is reduced over `ep` as
//! well.
//!
//! # Mixed precision
//! [`FullyShard::with_mixed_precision`] sets the element types in which units compute and reduce.
//! For example, a unit computes in `bf16` and reduces in `f32`, while the optimizer steps `f32`
//! shards. Without a type for reductions, gradients are reduced in the type in which their
//! parameter is stored. A model that computes in `f16` needs [`GradScaler`]: it scales the loss, so
//! that small gradients do not become zero.
//!
//! # Optimizers
//! burn's optimizers step shards. An optimizer that works element by element gives the same result
//! as on full parameters. An optimizer that needs a full parameter, or all parameters together,
//! sees only shards. In this table "equal" means bit-identical. `tests/suite/fsdp/optimizers.rs`
//! checks it for every configuration that changes the computation, on 2 and 3 ranks with uneven
//! shards on the CPU:
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
//! [`optim::sharded`](crate::optim::sharded) accepts only the equal ones. It has correct versions
//! of clipping by norm and of `Muon`. [`optim`](crate::optim) also saves and loads optimizer
//! states, by path and for any mesh.
//!
//! # Invariants
//! 1. The optimizer, records and gradients see shards only. The model's type and parameter paths
//!    never change.
//! 2. A unit makes one all-gather in forward, one in backward if its parameters were freed between,
//!    and one reduce-scatter. It may make three other kinds of collectives. With HSDP, an
//!    all-reduce sums the reduced shards over the replicas. If parameters are placed `Replicate`,
//!    one all-reduce reduces their gradients. Partial gradients are all-reduced over
//!    tensor-parallel ranks, once for each set of mesh dimensions along which they are partial
//!    ([`parallel`](crate::parallel), invariant 3). In addition to the gradients, a reduction
//!    transfers one flag per parameter: whether the rank has used it. Values that must be identical
//!    on several ranks are [compared](FullyShard::with_replica_check_every) by digests in the
//!    signatures of reductions.
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
//!    ranks may have different batches and use different parameters. The all-gathers of backward
//!    are posted when forward leaves a unit, on a separate communicator. Reductions have another
//!    communicator. They run in reverse order of entry; units without a tracked input and without
//!    an enclosing unit follow last, in order of entry. The reduction over the ranks that shard is
//!    waited for before the next unit's reduction is issued.
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
