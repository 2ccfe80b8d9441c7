//! Tensor and sequence parallelism: a plan of styles, and parameters placed by it.
//!
//! ```text
//!                 x (R)                            x (S(1): each rank a part of the sequence)
//!                   │                                │ all-gather
//!   colwise   W[:, mine]                         W[:, mine]
//!                   │ S(-1)                          │ S(-1)
//!   rowwise   W[mine, :]                         W[mine, :]
//!                   │ terms of a sum: all-reduce     │ terms of a sum: reduce-scatter
//!                 y (R)                            y (S(1))
//! ```
//!
//! [`parallelize`] places every parameter of an ordinary burn module on a mesh, as a [`Plan`]
//! of path patterns and [`Style`]s says. It moves values and nothing else: what a rank computes with
//! its shard is the business of the layer, which finds the style with its parameters
//! ([`styled`](crate::nn::apply_style)), as a block finds what it takes and returns
//! ([`prepared`](crate::nn::apply_io_layouts)). [`distribute_module`] asks a function instead of a plan.
//!
//! # Invariants
//! 1. The optimizer, records and gradients see shards only; the model's type and parameter paths
//!    never change.
//! 2. Tensor parallelism cuts first, [`fully_shard`](crate::fsdp::fully_shard) cuts its shard, whichever is
//!    called first: units gather and reduce nothing but the rank's own tensor-parallel shard.
//! 3. The gradients of which tensor-parallel ranks have terms (a norm's weight under sequence
//!    parallelism) are added up by one all-reduce a unit, for each set of mesh dimensions whose ranks
//!    have terms, before they are averaged over the data-parallel ranks. A unit without such gradients makes none.

mod distribute_module;
mod error;
mod parallelize;
mod plan;
mod resolve;

pub use distribute_module::{InputOutputFns, Styles, distribute_module};
pub use error::ParallelError;
pub use parallelize::parallelize;
pub use plan::Plan;

pub use crate::param::{LayerParam, PrepareModuleInputOutput, Style};
