//! [`DTensor`]: one tensor over a mesh of ranks.
//!
//! A DTensor is a rank's local tensor plus a [`DTensorSpec`] that says what it is a part of. Local
//! tensors live in burn's own autodiff graph; every change of layout is one node in it. With `k`
//! ranks along the mesh dimension and `g` the gradient of the result:
//!
//! | from -> to | forward | backward |
//! |---|---|---|
//! | `S(d)` -> `R` | all-gather | own slice of `g` |
//! | `R` -> `S(d)` | own slice | all-gather |
//! | `P(sum)` -> `R` | all-reduce | `g` |
//! | `P(avg)` -> `R` | all-reduce | `g / k` |
//! | `P(max)`, `P(min)` -> `R` | all-reduce | `g` where the local value is the extremum, shared evenly by the ranks that hold it |
//! | `P(product)` -> `R` | all-reduce | `g` times the other ranks' values |
//! | `P(op)` -> `S(d)` | reduce-scatter | all-gather, then as above |
//! | `S(a)` -> `S(b)` | all-to-all | all-to-all |
//! | `R` -> `P(sum)` | first rank keeps, others zero | `g` |
//! | `S(d)` -> `P(sum)` | zero-pad | own slice of `g` |
//! | `R` -> varying | nothing | all-reduce |
//! | `S(d)` -> varying | all-gather | reduce-scatter |
//!
//! | to find | look in |
//! |---|---|
//! | which steps lead from one layout to another | [`plan`](crate::placement::plan) |
//! | a step forward, and its gradient | `step`, `pullback`; together, as one node of the graph, `route` |
//! | with other element types, or not waited for at once | `request` |
//! | to another mesh | `transfer` |
//! | what a tensor already was redistributed to | `handles` |
//! | values that ranks use differently | `vary` |
//! | from plain tensors to DTensors | `create`, `distribute`, `check` |
//! | DTensors of no tensor: constants, random values, parameters, masks | `factory`, `random` by `philox`, `initialize`, `mask` |
//! | from and to PyTorch's strided shards | `strided` |
//! | a tensor in words, and drawn | `display`; `visualize_sharding` of the cells that are `grid`'s |
//! | how [`debug::trace_comm`](crate::debug::trace_comm) hears of what is sent, and which line asked for it | `src/watch.rs` |
//! | operators | [`ops`] |
//!
//! # Invariants
//! 1. The gradient of a Replicate value is Replicate, of a `S(d)` value is `S(d)`, of a Partial
//!    value is Replicate; it is the true derivative of the loss by the local value.
//! 2. A computation that differs between ranks reads a Replicate value only through
//!    [`vary`](DTensor::vary): each rank's gradient is then a term of a sum, and vary adds them up.
//! 3. A local tensor has exactly the shape that its spec gives this rank, also when that is empty.
//! 4. A collective runs on the ranks of one mesh dimension, or of those whose steps it makes at once, labelled
//!    with the layouts it goes between, in [`Phase::Forward`](crate::comm::Phase::Forward) or
//!    [`Phase::Backward`](crate::comm::Phase::Backward).
//! 5. Without tracked gradients nothing is recorded, and an unchanged layout costs nothing.
//! 6. Every rank records as many nodes of the autodiff graph, whatever the shape of its part: burn
//!    runs backward by depth, and so all ranks run the collectives of backward in one order. A
//!    program that puts its own ranks out of step, between [`to_local`](DTensor::to_local) and
//!    [`from_local`](DTensor::from_local), gets [`CommError::Mismatch`](crate::comm::CommError::Mismatch):
//!    the collectives carry the place that they were given in forward.

mod check;
mod collective;
mod create;
mod cross_mesh;
mod display;
mod distribute;
mod error;
mod factory;
mod grid;
mod initialize;
mod kind;
mod local;
mod mask;
pub mod ops;
mod philox;
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
pub use error::DTensorError;
pub(crate) use grid::Grid;
pub use kind::Kind;
#[cfg(feature = "testing")]
pub(crate) use local::{as_float, is_tracked};
pub(crate) use local::{associate, own};
pub use redistribute_options::{RedistributeOptions, RedistributeWork};
pub use spec::DTensorSpec;
pub(crate) use spec::RequiredPlacements;
pub use tensor::DTensor;
pub use visualize::visualize_sharding;
pub(crate) use vjp::MeshDims;
