//! Distributed tensors: a [`DTensor`] is one global tensor, stored as one local tensor on each rank
//! of a device mesh.
//!
//! A program computes with the global tensor, by burn's operators and with global shapes. A
//! placement for each mesh dimension says which local tensor a rank stores. A tensor of shape `[4,
//! 6]` on a mesh of two ranks:
//!
//! | placement | short | rank 0 stores | rank 1 stores |
//! |---|---|---|---|
//! | `Shard(0)` | `S(0)` | rows 0 and 1: `[2, 6]` | rows 2 and 3: `[2, 6]` |
//! | `Shard(1)` | `S(1)` | columns 0 to 2: `[4, 3]` | columns 3 to 5: `[4, 3]` |
//! | `Replicate` | `R` | the full tensor: `[4, 6]` | the same values: `[4, 6]` |
//! | `Partial(PartialOp::Sum)` | `P(sum)` | a summand: `[4, 6]` | another summand: `[4, 6]`; the tensor is the sum of both |
//!
//! Tables and errors have the short forms. The sum of a `P(sum)` tensor is computed when the tensor
//! is redistributed to another placement. There are other partial reductions: `P(avg)`, `P(max)`,
//! `P(min)` and `P(product)`.
//!
//! ```
//! use burn::tensor::Tensor;
//! use burn_dtensor::placement::Placement::Shard;
//! use burn_dtensor::prelude::*;
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//!     let full = Tensor::<2>::ones([4, 6], world.device());
//!     // Each rank keeps two of the four rows; nothing is sent.
//!     let rows = DTensor::distribute_replicated(full, &mesh, &[Shard(0)])?;
//!     assert_eq!(rows.local().dims(), [2, 6]);
//!     // One all-to-all: now each rank has three of the six columns.
//!     let columns = rows.redistribute(&[Shard(1)])?;
//!     assert_eq!(columns.local().dims(), [4, 3]);
//!     // One all-gather.
//!     assert_eq!(columns.full_tensor()?.dims(), [4, 6]);
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! # How an operator runs
//! An operator decides from the placements of its inputs. Every rank decides the same, without
//! communication:
//!
//! 1. Its sharding rule lists the placements with which each rank computes its local result from
//!    its local inputs only.
//! 2. If the inputs do not have such placements, they are redistributed, in the cheapest way.
//! 3. burn's operator runs on the local tensors.
//! 4. The result is a DTensor. The rule determines its placements.
//!
//! Two matrix products, for instance, need one all-reduce at the end:
//!
//! ```
//! use burn_dtensor::comm::Op;
//! use burn_dtensor::placement::{PartialOp, Placement::{Partial, Replicate, Shard}};
//! use burn_dtensor::prelude::*;
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//!     let ones = |shape: [usize; 2], placement| DTensor::<2>::ones(shape, &mesh, &[placement], world.device());
//!     let x = ones([4, 6], Replicate)?;
//!     // Each rank multiplies [4, 6] by its half of the columns, [6, 4].
//!     let h = x.matmul(ones([6, 8], Shard(1))?);
//!     assert_eq!((h.dims(), h.local().dims(), h.placements()), ([4, 8], [4, 4], &[Shard(1)][..]));
//!     // Each rank multiplies [4, 4] by its half of the rows, [4, 6]. The products are summands.
//!     let y = h.matmul(ones([8, 6], Shard(0))?);
//!     assert_eq!((y.dims(), y.local().dims(), y.placements()), ([4, 6], [4, 6], &[Partial(PartialOp::Sum)][..]));
//!     assert_eq!(world.ledger().calls(Op::AllReduce), 0);
//!     let y = y.redistribute(&[Replicate])?;
//!     assert_eq!(world.ledger().calls(Op::AllReduce), 1);
//!     assert_eq!(y.full_tensor()?.dims(), [4, 6]); // Replicate already: nothing is sent
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! # When ranks communicate
//! | call | communication |
//! |---|---|
//! | [`from_local`](DTensor::from_local), [`distribute_replicated`](DTensor::distribute_replicated), [`ones`](DTensor::ones) and other factories, random values | none |
//! | [`distribute_tensor`](DTensor::distribute_tensor) | one rank sends the shards |
//! | [`local`](DTensor::local), [`to_local`](DTensor::to_local), shapes and specs | none |
//! | [`redistribute`](DTensor::redistribute) | by the [table of changes](#changes-of-layout) |
//! | [`full_tensor`](DTensor::full_tensor), [`into_scalar`](DTensor::into_scalar) | as `redistribute` to `Replicate` |
//! | an operator | if it redistributes an input, and for some operators along a sharded dimension: [the list](ops#collective) |
//! | backward | in reverse, by the same table; a `Replicate` value with which ranks compute different things takes one all-reduce of its gradient |
//!
//! [`Launch::with_replica_checks`](crate::comm::Launch::with_replica_checks) makes calls that take
//! replicated values compare them, so those calls communicate too. The
//! [ledger](crate::comm::World::ledger) counts every collective. [`ops::explain`] shows why an
//! operator communicates. [`RedistributePolicy::Deny`](ops::RedistributePolicy::Deny) turns an
//! implicit redistribution into an error.
//!
//! # DTensor or `fully_shard`
//! | purpose | use |
//! |---|---|
//! | store a model in shards, while each rank computes on its own rows | [`fully_shard`](crate::fsdp::fully_shard): the program computes with plain tensors |
//! | compute one layer on several ranks, because it is too large or the batch is too small | DTensors, and [`parallelize`](crate::parallel::parallelize) for the parameters |
//! | both | `parallelize` over one mesh dimension, then `fully_shard` over another |
//! | compute with a few large tensors, without a model | DTensors, and [`DTensorOptimizer`](crate::optim::DTensorOptimizer) |
//!
//! Do not gather parameters one by one with `redistribute` in place of `fully_shard`. It gathers
//! all parameters of a unit in one collective, overlaps it with computation between processes, and
//! frees the unsharded parameters between forward and backward.
//!
//! # Structure
//! A DTensor consists of this rank's local tensor and a [`DTensorSpec`], which describes the global
//! tensor: mesh, layout, shape and element type. Local tensors are in burn's own autodiff graph,
//! and each change of layout is one node of that graph.
//!
//! ```text
//!   plain tensors                              plain tensors
//!       | distribute, create, factory              ^ to_local, full_tensor
//!       v                                          |
//!   +-- DTensor -----------------------------------+-------------------+
//!   |  local tensor | DTensorSpec | cache of redistributed results     |
//!   +------------------------------------------------------------------+
//!       | redistribute, vary, operators (`ops`)
//!       v
//!   RedistributePlan      the steps that `placement::plan` found, fused; cached per thread
//!       |
//!       +-- forward:   PlannedStep -> PendingStep --+
//!       |                                           +--> collectives of `comm`
//!       +-- backward:  RedistributeNode -> StepVjp -+
//! ```
//!
//! # Changes of layout
//! A value is *varying* if ranks hold identical values but compute different things with them, such
//! as products with their own columns of a weight. Then each rank's gradient is a summand, and
//! backward adds the summands up. See [`vary`](DTensor::vary).
//!
//! With `k` ranks along the mesh dimension and `g` the gradient of the result:
//!
//! | from -> to | forward | backward |
//! |---|---|---|
//! | `S(d)` -> `R` | all-gather | own slice of `g` |
//! | `R` -> `S(d)` | own slice | all-gather |
//! | `P(sum)` -> `R` | all-reduce | `g` |
//! | `P(avg)` -> `R` | all-reduce | `g / k` |
//! | `P(max)`, `P(min)` -> `R` | all-reduce | `g`, divided by the number of ranks with the extremum; 0 on all others |
//! | `P(product)` -> `R` | all-reduce | `g` times the other ranks' values |
//! | `P(op)` -> `S(d)` | reduce-scatter | all-gather, then as above |
//! | `S(a)` -> `S(b)` | all-to-all | all-to-all |
//! | `R` -> `P(sum)` | first rank keeps, others zero | `g` |
//! | `S(d)` -> `P(sum)` | zero-pad | own slice of `g` |
//! | `R` -> varying | nothing | all-reduce |
//! | `S(d)` -> varying | all-gather | reduce-scatter |
//!
//! # Invariants
//! 1. The gradient of an `R` value is `R`, of an `S(d)` value `S(d)`, and of a partial value `R`. It
//!    is the true derivative of the loss with respect to the local value.
//! 2. A computation that differs between ranks reads an `R` value only through
//!    [`vary`](DTensor::vary). Each rank's gradient is then a partial sum, and the backward of
//!    `vary` adds them up.
//! 3. A local tensor has exactly the shape that its spec computes for this rank, even if that shape
//!    is empty.
//! 4. A collective runs on the ranks of one mesh dimension, or of several if their steps are fused.
//!    Its label names the two layouts, and its phase is
//!    [`Phase::Forward`](crate::comm::Phase::Forward) or
//!    [`Phase::Backward`](crate::comm::Phase::Backward).
//! 5. Without tracked gradients no autodiff node is recorded, and an unchanged layout costs
//!    nothing.
//! 6. Every rank records the same number of autodiff nodes, whatever the shape of its local tensor.
//!    burn runs backward by depth, so all ranks run the collectives of backward in the same order.
//!    A program can break this order with its own code between [`to_local`](DTensor::to_local) and
//!    [`from_local`](DTensor::from_local). It then fails with
//!    [`CommError::Mismatch`](crate::comm::CommError::Mismatch), because each collective of
//!    backward carries the index that it was assigned in forward.
//!
//! # Source files
//! | topic | file |
//! |---|---|
//! | steps from one layout to another | [`plan`](crate::placement::plan) |
//! | one step in forward; its gradient | `step`; `vjp` |
//! | all steps of a redistribution as one node of the graph | `redistribute_plan` |
//! | redistribution in other element types, or in the background | `redistribute_options` |
//! | redistribution to another mesh | `cross_mesh` |
//! | cache of a tensor's redistributed results | `redistribute_cache` |
//! | replicated values that ranks use differently | `vary` |
//! | DTensors from plain tensors | `create`, `distribute`, `check` |
//! | new DTensors: constants, random values | `factory`, `random`, `philox` |
//! | new DTensors: parameters, masks | `initialize`, `mask` |
//! | PyTorch's strided shards | `strided` |
//! | tensors of different types in one collection | `dyn_dtensor` |
//! | a tensor as one line of text; as a drawing | `display`; `visualize`, which draws the cells of `grid` |
//! | how [`debug::trace_comm`](crate::debug::trace_comm) records collectives and their call sites | `src/watch.rs` |
//! | operators | [`ops`] |

mod check;
mod collective;
mod create;
mod cross_mesh;
mod display;
mod distribute;
mod dyn_dtensor;
mod error;
mod factory;
mod grid;
mod initialize;
mod kind;
mod local;
mod mask;
pub mod ops;
pub(crate) mod philox;
mod random;
mod redistribute;
mod redistribute_cache;
mod redistribute_options;
mod redistribute_plan;
mod spec;
mod step;
mod strided;
mod tensor;
mod vary;
mod visualize;
mod vjp;

pub use cross_mesh::CrossMeshRedistribute;
pub(crate) use distribute::send_parts;
pub use dyn_dtensor::DynDTensor;
pub use error::DTensorError;
pub(crate) use grid::Grid;
pub use kind::Kind;
pub(crate) use kind::is_castable;
#[cfg(feature = "testing")]
pub(crate) use local::{as_float, is_tracked};
pub(crate) use local::{associate, cast, own};
pub use redistribute_options::{RedistributeOptions, RedistributeWork};
pub use spec::DTensorSpec;
pub(crate) use spec::RequiredPlacements;
pub use tensor::DTensor;
pub(crate) use visualize::draw_grid;
pub use visualize::visualize_sharding;
pub(crate) use vjp::MeshDims;
