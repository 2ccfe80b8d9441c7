//! Tensor and sequence parallelism: a plan assigns styles to layers, and their parameters are
//! placed accordingly.
//!
//! The ranks of a tensor-parallel mesh compute a layer together, on
//! [`DTensor`](crate::dtensor::DTensor)s. The same forward also runs on one device.
//!
//! ```
//! # use burn::module::Module;
//! # use burn::nn::{Linear, LinearConfig};
//! use burn_dtensor::prelude::*;
//!
//! # #[derive(Module, Debug)]
//! # struct Mlp {
//! #     up: Linear,
//! #     down: Linear,
//! # }
//! impl Mlp {
//!     fn forward(&self, x: DTensor<2>) -> DTensor<2> {
//!         self.down.forward_dtensor(self.up.forward_dtensor(x).tanh())
//!     }
//! }
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//!     let device = world.device().clone().autodiff();
//!     let mlp = Mlp { up: LinearConfig::new(8, 32).init(&device), down: LinearConfig::new(32, 8).init(&device) };
//!
//!     let plan = Plan::new().with_style("up", Style::colwise()).with_style("down", Style::rowwise());
//!     let mlp = parallelize(mlp, &mesh, plan)?;
//!     assert_eq!(mlp.up.weight.base().dims(), [8, 16]); // this rank's half of the columns of [8, 32]
//!
//!     let x = DTensor::ones([4, 8], &mesh, &[Placement::Replicate], &device)?;
//!     let y = mlp.forward(x); // one all-reduce, after `down`
//!     assert_eq!(y.placements(), [Placement::Replicate]);
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! | purpose | use |
//! |---|---|
//! | two layers in a row, such as in a perceptron | [`Style::colwise`], then [`Style::rowwise`] |
//! | attention | [`Style::colwise`] for query, key and value and [`Style::rowwise`] for the output, each [`with_heads`](Style::with_heads) |
//! | an embedding | [`Style::rowwise`] shards it by vocabulary, [`Style::colwise`] by features |
//! | sequence parallelism between the layers | [`Style::sequence_parallel`] for norms; [`Style::rowwise`] with `.with_output(Shard(1))` |
//! | other parameters, such as the stacked weights of experts | [`Style::placed`] |
//! | a user-defined layer | [`Style::custom`]; its forward calls [`apply_style`](crate::nn::apply_style) |
//! | a block whose inputs and outputs have other layouts | [`Plan::with_io`]; its forward calls [`apply_io_layouts`](crate::nn::apply_io_layouts) |
//! | plain tensors around a parallelized block | [`apply_io_layouts_local`](crate::nn::apply_io_layouts_local) or [`InputOutputFns`] |
//! | a mesh of several dimensions | [`Plan::with_mesh_dim_plan`] |
//! | placements by a function instead of a plan | [`distribute_module`] |
//! | FSDP as well | [`fully_shard`](crate::fsdp::fully_shard) on the result, with other dimensions of the same mesh |
//! | units without FSDP | [`Plan::with_units`] |
//!
//! A module without a style is replicated. [`Plan`] describes the path patterns, [`Style`] the
//! placements of each style.
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
//! outputs ([`apply_io_layouts`](crate::nn::apply_io_layouts)). The layers that
//! [`nn`](crate::nn) lists do this in `forward_dtensor`. burn's own `forward` computes with the full
//! parameters, identically on every rank.
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
