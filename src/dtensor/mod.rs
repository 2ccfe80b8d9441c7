//! Distributed tensors: a [`DTensor`] is one global tensor, stored as one local tensor on each rank
//! of a device mesh.
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
//! A DTensor consists of this rank's local tensor and a [`DTensorSpec`], which describes the global
//! tensor: mesh, layout, shape and element type. Local tensors live in burn's own autodiff graph,
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
//! A value is *varying* if ranks hold identical values but compute different things with them; see
//! [`vary`](DTensor::vary).
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
//!
//! # Invariants
//! 1. The gradient of a Replicate value is Replicate, of an `S(d)` value `S(d)`, and of a Partial
//!    value Replicate. It is the true derivative of the loss with respect to the local value.
//! 2. A computation that differs between ranks reads a Replicate value only through
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
