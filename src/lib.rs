//! DTensor-first tensor-parallel training on [burn](https://burn.dev), with fully sharded data
//! parallelism (FSDP) as one placement.
//!
//! The same program runs on every rank. A [`DeviceMesh`](mesh::DeviceMesh) says where a rank sits,
//! a [`Placement`](placement::Placement) per mesh dimension says what it holds of a tensor, and every
//! parallelism is a choice of placements: replicate the parameters and it is data parallelism,
//! shard them and it is FSDP, do both on a 2-D mesh and it is HSDP. Layers split over ranks that
//! compute together make tensor parallelism, on a mesh dimension of its own.
//!
//! # The smallest complete program
//!
//! An ordinary burn model, trained on four ranks. Each holds a quarter of every parameter, of its
//! gradient and of its optimizer state; [`unit`](fn@fsdp::unit) marks what is gathered together.
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
//! use burn::tensor::{Distribution, Tensor};
//! use burn_dtensor::prelude::*;
//!
//! #[derive(Module, Debug)]
//! struct Net {
//!     blocks: Vec<Linear>,
//!     head: Linear,
//! }
//!
//! impl Net {
//!     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
//!         unit(self, x, |net, mut x| {
//!             for block in &net.blocks {
//!                 x = unit(block, x, |block, x| block.forward(x).tanh());
//!             }
//!             net.head.forward(x)
//!         })
//!     }
//! }
//!
//! # fn main() -> Result<(), LaunchError> {
//! launch(Launch::threads(4), |world| {
//!     let mesh = DeviceMesh::new(world, [4], ["shard"])?;
//!     let device = world.device().clone().autodiff();
//!     let net = Net {
//!         blocks: (0..2).map(|_| LinearConfig::new(16, 16).init(&device)).collect(),
//!         head: LinearConfig::new(16, 1).init(&device),
//!     };
//!     let mut net = fully_shard(net, &mesh, FullyShard::new().with_units(["blocks.*"]))?;
//!     assert_eq!(net.head.weight.base().dims(), [4, 1]); // this rank's shard of [16, 1]
//!
//!     let mut optim = AdamWConfig::new().init();
//!     for _ in 0..3 {
//!         let x = Tensor::random([8, 16], Distribution::Default, &device);
//!         let loss = (net.forward(x) - 1.0).square().mean();
//!         let grads = GradientsParams::from_grads(loss.backward(), &net);
//!         net = optim.step(1e-2, net, grads); // burn's own optimizer, on the shards
//!     }
//!     let full = full_model(&net)?; // an ordinary module again
//!     assert_eq!(full.head.weight.val().dims(), [16, 1]);
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Rooms
//!
//! | module | what it holds |
//! |---|---|
//! | [`comm`] | ranks, groups, collectives that never hang, the ledger |
//! | [`mesh`] | [`DeviceMesh`](mesh::DeviceMesh): named dimensions, slices, collectives of plain tensors |
//! | [`placement`] | placements, layouts, how lengths are cut, the transition table; pure |
//! | [`dtensor`] | [`DTensor`](dtensor::DTensor): a tensor over a mesh, its redistribution, and its [operators](dtensor::ops) |
//! | [`fsdp`] | [`fully_shard`](fsdp::fully_shard) for any burn module: parameters are stored as shards and unsharded by [`unit`](fn@fsdp::unit) |
//! | [`parallel`] | [`parallelize`](parallel::parallelize): tensor-parallel placements by a plan; [`distribute_module`](parallel::distribute_module): by a function |
//! | [`optim`] | the state of burn's optimizers by path, for any mesh; burn's optimizers on DTensors without a module |
//! | [`nn`] | the forward of burn-nn's layers over DTensors |
//! | [`debug`] | [`trace_comm`](debug::trace_comm): what is sent, and which line asked for it; [`visualize_model`](debug::visualize_model): which rank holds what of a model |
//!
//! With the feature `testing` there is also a room of mesh fixtures for tests, and the prover of
//! operators' rules.
#![warn(missing_docs)]
// The ranks' shared memory and the copies between tensors are built without the backend that uses them, too.
#![cfg_attr(not(feature = "flex"), allow(dead_code, unused_variables))]
#![cfg_attr(not(any(feature = "flex", feature = "cube")), allow(unused_imports, unused_macros))]

mod autodiff;
pub mod comm;
pub mod debug;
pub mod dtensor;
mod error;
pub mod fsdp;
mod kernels;
mod memory;
pub mod mesh;
pub mod nn;
pub mod optim;
pub mod parallel;
mod param;
mod pattern;
pub mod placement;
#[cfg(feature = "testing")]
pub mod testing;
mod watch;

pub use error::{Error, Result};

/// What most programs import, those that write a parallel model too: with `module`, `activation` and `loss`
/// they find burn's functions over DTensors.
pub mod prelude {
    pub use crate::comm::{Launch, LaunchError, ReduceOp, World, launch};
    pub use crate::dtensor::ops::{RedistributePolicy, activation, loss, module};
    pub use crate::dtensor::{DTensor, DTensorSpec};
    pub use crate::fsdp::{
        BufferSync, FsdpModule, FullyShard, GradScaler, MixedPrecisionPolicy, NormType, ParamExt, ReshardAfterForward,
        checkpoint_activations, clip_grad_norm, describe, full_model, fully_shard, named_parameters, sync_buffers,
        unit,
    };
    pub use crate::mesh::{DeviceMesh, with_mesh};
    pub use crate::nn::{DTensorForward, GroupedQueryAttention, GroupedQueryAttentionConfig, MhaInput, apply_style};
    pub use crate::parallel::{Plan, Style, parallelize};
    pub use crate::placement::{Layout, PartialOp, Placement};
    pub use crate::{Error, Result, tensor_tree};
}

/// The README's program, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
