//! Fully sharded data parallelism (FSDP): trains ordinary burn modules whose parameters, gradients
//! and optimizer states are sharded over ranks.
//!
//! The [crate page](crate) has a complete program.
//!
//! [`fully_shard`] attaches a reparameterization to every parameter: the stored value is this
//! rank's shard, and layers read the full parameter. Parameters are gathered and reduced in
//! **units**, each with one all-gather and one reduce-scatter. [`unit`](fn@unit) marks the
//! beginning and the end of a unit's forward. Units of inner modules can also be opened by the
//! first read of a parameter.
//!
//! ```text
//! forward    root: all-gather │ block 0: all-gather, compute, free │ block 1: ... │ head
//! backward   head │ block 1: all-gather, gradients, reduce-scatter, free │ block 0: ... │ root: reduce-scatter
//! optimizer  burn's own, on the shards
//! ```
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
//!    divisor, or postpones the reduction to a later backward. On groups whose size is a power of
//!    two, data parallelism, FSDP and HSDP agree bit for bit.
//! 4. A parameter that only some ranks use counts as zeros on the others. A parameter that no rank
//!    uses has no gradient, as without sharding. If a unit leaves a tracked input unused, the
//!    operation that made the input receives zeros. A parameter of a unit that receives nothing but
//!    these has no gradient; one that the loss depends on has one, even if it is zero.
//! 5. A failing collective of a forward or backward unwinds the rank with the typed error. A
//!    function that returns a `Result` returns the error.
//! 6. Backward's collectives follow the order of forward, whatever the depth of a rank's graph, so
//!    ranks may have different batches and use different weights. The all-gathers of backward are
//!    posted when forward leaves a unit, on a separate communicator. Reductions have another
//!    communicator. They run in reverse order of entry; units without a tracked input and without
//!    an enclosing unit follow last, in order of entry. Each reduction is waited for before the
//!    next one is issued.
//! 7. Values of different models are never combined. Collectives carry the number of the
//!    `fully_shard` call and the states of the parameters. So ranks fail with an error if they run
//!    models of equal shapes in different orders, or clones whose parameters are no longer the
//!    same.
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
//! | `GradientClipping::Norm` | different | norm of one parameter's shard; [`clip_grad_norm`] uses that of all |
//! | `Lamb` | different | scales steps by the norm of each parameter |
//! | `Adafactor` | different | uses means over rows, columns and all elements of a parameter |
//! | `Muon` | different | orthogonalizes the step of a full parameter, and scales it by the parameter's shape |
//! | `LBFGS` | different | uses products of vectors of all parameters, and the loss of a single rank |
//!
//! [`optim::sharded`](crate::optim::sharded) accepts only the equal ones, and has correct versions
//! of clipping by norm and of `Muon`. [`optim`](crate::optim) also saves and loads optimizer
//! states, by path and for any mesh.
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
//! With [`FullyShard::with_mixed_precision`], units compute in `bf16` or `f16` and reduce in `f32`,
//! while the optimizer steps `f32` shards. [`GradScaler`] scales the loss of models that compute in
//! `f16`, whose small gradients would vanish otherwise.
//!
//! # Checking a model
//! [`compare`](fn@compare) runs one batch through the sharded model and through the full one, and
//! names the first unit and the parameters that differ.
//!
//! # Memory
//! Between forward and backward a freed unit holds only its shards, whatever the graph has saved:
//! the gathered weights are in evictable storage, which the unit can free while views of it exist.
//! On a GPU, this applies only to units of one module that [`unit`](fn@unit) has opened, without
//! burn's fusion. In other units on a GPU, a weight view that the graph has saved keeps the
//! gathered unit until backward. burn's layers save such views for inputs of three dimensions. A
//! weight that is read outside its unit's scope is freed when the graph drops it. So is the full
//! value of a parallelized weight that is read with [`val`](burn::module::Param::val). To compute
//! with the rank's tensor-parallel shard, read it with [`dtensor`](ParamExt::dtensor).
//!
//! With [`FullyShard::with_offload`] the shards are in host memory, and so are gradients and
//! optimizer states. The device holds only activations and the weights of open units.
//!
//! To keep the order of reductions (invariant 6), a rank may have to hold gradients back. Inside a
//! unit that encloses others, it never does. Units without an enclosing unit may belong to two
//! losses. So if a model has two parallel towers of such units, the gradients of one tower are held
//! until the other is complete: for two towers of 32 blocks, this is 11 more blocks' gradients than
//! with an enclosing unit. Open a unit around the model with `unit` to avoid this.

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
