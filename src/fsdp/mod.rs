//! Fully sharded data parallelism: parameters as `Shard` DTensors, gathered unit by unit.
//!
//! ```text
//! forward    root: all-gather │ block 0: all-gather, compute, free │ block 1: ... │ head
//! backward   head │ block 1: all-gather, gradients, reduce-scatter, free │ block 0: ... │ root: reduce-scatter
//! optimizer  burn's own, on the shards
//! ```
//!
//! [`fully_shard`] attaches a reparameterization to every parameter of an ordinary burn module:
//! the stored value is this rank's shard, the value layers read is the whole. Parameters move in
//! **units**, each with one all-gather and one reduce-scatter; [`unit`](fn@unit) marks where a unit's
//! forward begins and ends; of units inside, reads may.
//!
//! # Invariants
//! 1. The optimizer, records and gradients see shards only; the model's type and parameter paths
//!    never change.
//! 2. A unit makes one all-gather in forward, one in backward if it was freed between, and one
//!    reduce-scatter. It makes no other collective, but for HSDP's all-reduce of the reduced shards,
//!    one all-reduce if it holds parameters placed `Replicate`, and one over the tensor-parallel
//!    ranks if these have terms of its gradients, for each set of mesh dimensions whose ranks do
//!    ([`parallel`](crate::parallel), invariant 3). A
//!    reduction carries one number per parameter beside the gradients: whether the rank has used it. What several ranks
//!    hold alike is [compared](FullyShard::with_replica_check_every) by digests in the fingerprints of reductions.
//! 3. Gradients are averages over all data-parallel ranks, unless [`FsdpModule`] has set another divisor, or has them
//!    wait for a later backward. On power-of-two groups data parallel, FSDP and HSDP agree to the bit.
//! 4. A parameter that some ranks do not use counts as zeros there; one that no rank uses has no
//!    gradient, as without sharding. Where a unit has left a tracked input unused, what made it gets
//!    zeros, and from there on a gradient that is all zeros on every rank counts as none.
//! 5. A collective of a forward or backward that fails unwinds the rank with the typed error. A function that returns a
//!    `Result` returns the error.
//! 6. Backward's collectives follow the order of forward, whatever the depth of a rank's graph: ranks
//!    may have other batches, and use other weights. All-gathers for backward are issued when forward
//!    leaves a unit, on a sequence of their own; reductions, on another, come in reverse order of
//!    entry, and those of units that nothing leads to (no tracked input, no unit around them) last, in
//!    order of entry. Each is waited for before the next is issued.
//! 7. No value is of two models. Collectives carry the number of the `fully_shard` call and the states of the parameters, so
//!    that ranks fail with an error that run models of equal shapes in different orders, or clones whose parameters are no
//!    longer the same.
//!
//! # Optimizers
//! burn's optimizers step shards. What works element by element makes of a shard what it makes of the whole; what looks
//! at a whole parameter, or at all of them, sees shards. `tests/suite/fsdp/optimizers.rs` holds this table to 2 and 3
//! ranks with uneven shards on Flex, where "equal" is to the bit, in every configuration of an optimizer that does
//! something else:
//!
//! | optimizer | on shards | why |
//! |---|---|---|
//! | `Sgd` | equal | with momentum, Nesterov's too, and weight decay |
//! | `Adam` | equal | with AMSGrad and weight decay |
//! | `AdamW` | equal | with AMSGrad and cautious weight decay |
//! | `AdaGrad` | equal | with decaying rates and weight decay |
//! | `RmsProp` | equal | centered or not, with weight decay |
//! | `Adan` | equal | with weight decay, by the proximal step or not |
//! | `Lion` | equal | with weight decay |
//! | `GradientClipping::Value` | equal | element by element |
//! | `GradientClipping::Norm` | different | the norm of one parameter's shard; [`clip_grad_norm`] has that of them all |
//! | `Lamb` | different | steps are as long as the norm of a parameter says |
//! | `Adafactor` | different | means over rows, columns and the whole of a parameter |
//! | `Muon` | different | a parameter's step is made orthogonal as a whole, and scaled by its shape |
//! | `LBFGS` | different | products of vectors of all parameters, and a loss of its own on each rank |
//!
//! [`optim::sharded`](crate::optim::sharded) takes the equal ones alone, and has the right one of the norm's clipping and
//! of `Muon`. What they remember, by path and for any mesh, is [`optim`](crate::optim)'s business too.
//!
//! # Meshes of several dimensions
//! [`FullyShard::with_shard_dims`] and [`FullyShard::with_replicate_dims`] name the dimensions of a mesh that shard and
//! replicate, each perhaps several: their ranks together, as over one dimension. Tensor parallelism has others, in any
//! order.
//!
//! A parameter may be on a mesh of its own: cut over fewer dimensions ([`ParamPlacement::with_mesh_dims`]), the others
//! replicating it; or placed over some of them already. Experts are: [`parallelize`](crate::parallel::parallelize)
//! places the stacked weights of all, `Shard(0)` over a dimension `ep` of the data-parallel ones, and `fully_shard`
//! cuts them over the rest:
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
//! assert_eq!(block.experts.up.base().dims(), [2, 16, 32]); // over `efsdp`, of the four that a rank along `ep` computes
//! assert_eq!(block.experts.up.dtensor()?.local().dims(), [4, 16, 32]);
//! # Ok(())
//! # })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! A unit whose parameters are on several meshes is as many units, which are entered together: each has its collectives, over
//! its own ranks. Ranks along `ep` have tokens of their own, so each rank's loss is that of its own. Tokens come to the
//! rank of their expert as a [`DTensor`](crate::dtensor::DTensor): from `Shard` of tokens to `Shard` of experts is an
//! all-to-all, and back. On the way back through it the gradient of an expert becomes the sum over all ranks along `ep`; the
//! unit adds those along `efsdp`, and divides by the number of all data-parallel ranks, not by the few that it reduces over:
//! the gradient of the mean of all ranks' losses, as of any other parameter (torchtitan's `gradient_divide_factor`). Experts
//! that are read whole, by [`val`](burn::module::Param::val), have the same gradient: it is reduced over `ep`, too.
//!
//! # Mixed precision
//! [`FullyShard::with_mixed_precision`] has units compute in `bf16` or `f16` and reduce in `f32`, while the optimizer steps
//! `f32` shards; [`GradScaler`] scales the loss of those that compute in `f16`, whose small gradients would vanish.
//!
//! # What stays in memory
//! Between forward and backward a freed unit holds its shards and nothing else, whatever the graph
//! saved of it: the gathered weights live in memory that the unit takes back under every view of them. On a GPU that
//! is so of units of one module that [`unit`](fn@unit) has opened, without burn's fusion: of others a view of a weight that
//! the graph has saved, as layers of burn save it of inputs of three dimensions, keeps the gathered unit until backward. A
//! weight read outside its unit's scope is freed when the graph drops it, and so is the whole of a
//! parallelized weight that is read by [`val`](burn::module::Param::val): to compute with the rank's
//! part is what [`dtensor`](ParamExt::dtensor) is for.
//!
//! With [`FullyShard::with_offload`] the shards themselves are in host memory, and with them gradients and what an
//! optimizer remembers: a device has the weights of open units, and activations.
//!
//! To keep that order a rank may have to hold gradients back. Inside a unit that encloses others it
//! never does. Units that nothing encloses may belong to two losses, so parallel towers of them hold
//! the gradients of one tower until the other is through: of 32 blocks beside 32, 11 more than where a
//! unit encloses both. Write `unit` around the model.

mod balance;
mod by_unit;
mod clip;
mod config;
mod dims;
mod error;
mod named;
mod plan;
mod powers;
mod precision;
mod remesh;
mod scaler;
mod shard;

pub use clip::{NormType, clip_grad_norm};
pub use config::{FullyShard, ParamInfo, ParamPlacement};
pub use error::FsdpError;
pub use named::{NamedParameter, named_parameters};
pub use precision::MixedPrecisionPolicy;
pub use remesh::remesh;
pub use scaler::GradScaler;
pub use shard::fully_shard;

pub use crate::param::{
    BufferSync, Description, DistributedParameter, Event, EventKind, FloatMapFn, FsdpModule, Grads, NoSync,
    OffloadPolicy, ParamError, ParamExt, Prefetch, ReducedGradients, ReshardAfterForward, ShardedState, TensorTree,
    TrainingState, UnitCollectives, UnshardHandle, checkpoint_activations, describe, full_model, full_model_on,
    record_events, reshard, sync_buffers, unit, unshard,
};
