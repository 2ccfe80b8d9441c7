//! Trains [burn](https://burn.dev) models that are too large for one device, or too slow on it. The
//! parameters, gradients and optimizer state of a model are sharded over the ranks of a mesh (FSDP,
//! HSDP); data, tensor, sequence and expert parallelism combine with that on further mesh
//! dimensions. A model keeps its types, its parameter paths and burn's optimizers.
//!
//! Use plain burn if one device is enough. There is no pipeline parallelism. Ranks on several GPUs
//! exchange tensors by NCCL, which is tested on simulated GPUs and has never run on several real
//! ones.
//!
//! - [The book](book): [quick start](book::quick_start), [concepts](book::concepts), a guide for each
//!   task, [coming from PyTorch](book::from_pytorch), [limits](book::limits).
//! - [`prelude`]: what most programs import.
//!
//! Every rank runs the same program. A [`DeviceMesh`](mesh::DeviceMesh) arranges the ranks in named
//! dimensions. For each mesh dimension, a [`Placement`](placement::Placement) describes which data
//! of a tensor a rank holds. Each kind of parallelism is a choice of placements: replicated
//! parameters give data parallelism, sharded parameters give FSDP, and parameters that are
//! replicated over one mesh dimension and sharded over another give HSDP. Tensor parallelism shards
//! layers over a further mesh dimension, whose ranks compute a layer together.
//!
//! # The smallest complete program
//!
//! An ordinary burn model is trained on four ranks. Each parameter is sharded along its first
//! dimension, and its gradient and optimizer state in the same way, so each rank holds about a
//! quarter of all three. A dimension shorter than the number of ranks, such as a bias of one
//! element, is on the first ranks only. [`unit`](fn@fsdp::unit) marks the modules whose parameters
//! are gathered together.
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::{Distribution, Tensor};
//! use burn_dtensor::dtensor::ops::random;
//! use burn_dtensor::optim::sharded;
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
//!     let mut optim = sharded(AdamWConfig::new());
//!     for _ in 0..3 {
//!         let x = random::tensor([8, 16], Distribution::Default, &device); // another batch on each rank
//!         let loss = (net.forward(x) - 1.0).square().mean();
//!         let grads = GradientsParams::from_grads(loss.backward(), &net);
//!         net = optim.step(1e-2, net, grads)?; // burn's AdamW, on the shards
//!     }
//!     let full = full_model(&net)?; // an ordinary module again
//!     assert_eq!(full.head.weight.val().dims(), [16, 1]);
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! | module | contents |
//! |---|---|
//! | [`comm`] | ranks, groups, collectives that fail on all ranks together, the ledger |
//! | [`mesh`] | [`DeviceMesh`](mesh::DeviceMesh): named dimensions, slices, collectives of plain tensors |
//! | [`placement`] | placements, layouts, shard sizes, and the transitions between layouts; pure arithmetic |
//! | [`dtensor`] | [`DTensor`](dtensor::DTensor): a tensor over a mesh, its redistribution, and its [operators](dtensor::ops) |
//! | [`data`] | [`DistributedSampler`](data::DistributedSampler): the rows of a dataset that each rank trains on |
//! | [`fsdp`] | [`fully_shard`](fsdp::fully_shard) for any burn module: parameters are stored as shards and unsharded by [`unit`](fn@fsdp::unit); [`compare`](fsdp::compare()): runs one batch through the sharded and the full model |
//! | [`replicate`] | [`replicate`](replicate::replicate()): data parallelism, with gradients averaged in buckets; gradient hooks; [`Join`](replicate::Join) for ranks with different numbers of batches |
//! | [`parallel`] | [`parallelize`](parallel::parallelize): assigns tensor-parallel placements by a plan; [`distribute_module`](parallel::distribute_module): assigns them by a function |
//! | [`optim`] | [`sharded`](optim::sharded): burn's optimizers on a distributed model, with their state by parameter path, loadable on any mesh; burn's optimizers for DTensors outside a module |
//! | [`checkpoint`] | checkpoints that survive a power loss and load on any mesh; [`StateDict`](checkpoint::StateDict): a model's tensors by path |
//! | [`nn`] | forward passes of burn-nn's layers for DTensors |
//! | [`debug`] | [`trace_comm`](debug::trace_comm): reports what is sent and which line of the program caused it; [`visualize_model`](debug::visualize_model): shows which rank holds which shard of a model |
//!
//! Features add more:
//!
//! | feature | contents |
//! |---|---|
//! | `flex` (default) | burn's CPU backend |
//! | `wgpu`, `cuda` | burn's GPU backends |
//! | `nccl` | `Launch::with_nccl`: ranks on several NVIDIA GPUs exchange tensors by NCCL; includes `cuda` |
//! | `mpi` | ranks in several processes and on several hosts |
//! | `dataset` | `data::DistributedLoader`: a loader of each rank's rows for burn's `Dataset` |
//! | `store` | `pretrained`: weights in safetensors and PyTorch files |
//! | `testing` | `testing`: mesh fixtures for tests, and a checker of the operators' sharding rules |
//! | `train` | `train`: burn's `SupervisedTraining` on the ranks of a mesh |
//! | `anyhow` | `?` on `anyhow::Error` inside `launch` |
//!
//! Rust 1.95 or newer, and burn 0.22.
#![warn(missing_docs)]
// Labels of features on docs.rs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// The host memory shared by ranks and the copies between tensors are compiled even without the
// backend that uses them.
#![cfg_attr(not(feature = "flex"), allow(dead_code, unused_variables))]
#![cfg_attr(
    not(any(feature = "flex", feature = "cube")),
    allow(unused_imports, unused_macros)
)]

mod autodiff;
#[cfg(any(doc, doctest))]
pub mod book;
mod burn_compat;
pub mod checkpoint;
pub mod comm;
pub mod data;
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
#[cfg(feature = "store")]
pub mod pretrained;
pub mod replicate;
mod tensor_tree;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "train")]
pub mod train;
mod watch;

pub use error::{Error, Result};

/// Imports for most programs. With `module`, `activation` and `loss` it also contains burn's
/// functions for DTensors, which a program needs to write a parallel model.
pub mod prelude {
    pub use crate::comm::{Launch, LaunchError, ReduceOp, World, launch};
    pub use crate::data::{DistributedSampler, LastBatch};
    pub use crate::dtensor::ops::{RedistributePolicy, activation, loss, module};
    pub use crate::dtensor::{DTensor, DTensorSpec};
    pub use crate::fsdp::{
        BufferSync, FsdpModule, FullyShard, GradScaler, MixedPrecisionPolicy, NormType, ParamExt,
        ReshardAfterForward, checkpoint_activations, clip_grad_norm, describe, full_model,
        fully_shard, named_parameters, sync_buffers, unit,
    };
    pub use crate::mesh::{DeviceMesh, with_mesh};
    pub use crate::nn::{
        DTensorForward, GroupedQueryAttention, GroupedQueryAttentionConfig, apply_style,
    };
    pub use crate::parallel::{ParamStyles, Plan, Style, parallelize};
    pub use crate::placement::{Layout, PartialOp, Placement};
    pub use crate::{Error, Result, tensor_tree};
}

/// The README: its Rust blocks are compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
