//! Tensor and sequence parallelism: a plan assigns styles to layers, and their parameters are
//! placed accordingly.
//!
//! ```text
//!                 x (R)                            x (S(1): each rank has a shard of the sequence)
//!                   │                                │ all-gather
//!   colwise   W[:, own]                          W[:, own]
//!                   │ S(-1)                          │ S(-1)
//!   rowwise   W[own, :]                          W[own, :]
//!                   │ partial sums: all-reduce       │ partial sums: reduce-scatter
//!                 y (R)                            y (S(1))
//! ```
//!
//! [`parallelize`] places every parameter of an ordinary burn module on a mesh, according to the
//! path patterns and [`Style`]s of a [`Plan`]. It changes only the placement of the values. Each
//! layer decides how to compute with its shard: it finds the style with its parameters
//! ([`apply_style`](crate::nn::apply_style)), and a block finds the layouts of its inputs and
//! outputs ([`apply_io_layouts`](crate::nn::apply_io_layouts)). [`distribute_module`] uses a
//! function in place of a plan.
//!
//! # Invariants
//! 1. The optimizer, records and gradients contain shards only. The model's type and parameter
//!    paths never change.
//! 2. Tensor parallelism is the outermost shard, and [`fully_shard`](crate::fsdp::fully_shard)
//!    shards the tensor-parallel shard, whichever is called first. Units gather and reduce only the
//!    rank's own tensor-parallel shard.
//! 3. If tensor-parallel ranks have partial gradients (for example a norm's weight under sequence
//!    parallelism), these are summed before they are averaged over the data-parallel ranks. This
//!    takes one all-reduce per unit and set of mesh dimensions, and none in units without such
//!    gradients.

mod after_fsdp;
mod distribute_module;
mod error;
mod parallelize;
mod plan;
mod prepare;
mod resolve;
mod style;

pub use distribute_module::{InputOutputFns, Styles, distribute_module};
pub use error::ParallelError;
pub use parallelize::parallelize;
pub use plan::Plan;
pub(crate) use prepare::IoLayout;
pub use prepare::PrepareModuleInputOutput;
pub use style::{LayerParam, ParamStyles, Style};
pub(crate) use style::{Prepared, layer_styles, prepared_of};
