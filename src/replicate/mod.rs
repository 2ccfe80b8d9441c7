//! Data parallelism: every rank holds the full model and trains on its own rows, and gradients are
//! averaged over the ranks.
//!
//! Use it for a model that fits on every device, with its gradients and optimizer state, and that
//! should train faster. [`replicate`] does what PyTorch's `DistributedDataParallel` (DDP) does:
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::Tensor;
//! use burn_dtensor::optim::sharded;
//! use burn_dtensor::prelude::*;
//! use burn_dtensor::replicate::{DataParallel, replicate};
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["dp"])?;
//!     let device = world.device().clone().autodiff();
//!     let mut model: Linear = replicate(LinearConfig::new(8, 6).init(&device), &mesh, DataParallel::new())?;
//!     let mut optim = sharded(AdamWConfig::new());
//!     for step in 0..3 {
//!         let batch = Tensor::<2>::full([4, 8], (2 * step + world.rank()) as f32, &device); // this rank's rows
//!         let loss = unit(&model, batch, |model, x| model.forward(x)).square().mean();
//!         let grads = GradientsParams::from_grads(loss.backward(), &model); // averaged over the ranks
//!         model = optim.step(1e-3, model, grads)?;
//!     }
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! The model keeps its type and its parameter paths. Every rank needs its own rows, for example
//! from a [`DistributedSampler`](crate::data::DistributedSampler). With a mean loss and equally
//! many rows on each rank, the averaged gradients equal the gradients of the global batch.
//!
//! # Relation to `fully_shard`
//! [`replicate`] is [`fully_shard`](crate::fsdp::fully_shard) with every parameter placed
//! `Replicate`. It has the same units, the same backward and the same events. So the functions of
//! [`fsdp`](crate::fsdp) for a sharded model work here too, among them [`FsdpModule`],
//! [`full_model`](crate::fsdp::full_model) and [`clip_grad_norm`](crate::fsdp::clip_grad_norm), and
//! so do [optimizers](crate::optim) and [checkpoints](crate::checkpoint).
//!
//! | | `replicate` | `fully_shard` |
//! |---|---|---|
//! | parameters, gradients, optimizer state of a rank | full | `1 / n` of each |
//! | collectives of a step | one all-reduce for each bucket | for each unit at most two all-gathers, and one reduce-scatter |
//! | `unit` around the model | needed to average during backward | needed to gather and free by unit |
//! | units | by default the top-level modules, and the items of top-level lists | by default one, with all parameters |
//!
//! Modules inside the model may already be sharded by `fully_shard`, and a replicated module may be
//! inside a model that is sharded later. Each module keeps the units of the call that came first.
//!
//! # Relation to PyTorch's DDP
//!
//! | DDP | here |
//! |---|---|
//! | a wrapper; `ddp.module` is the model | no wrapper: the model itself |
//! | `process_group` | the mesh, or some of its dimensions: [`with_mesh_dims`](DataParallel::with_mesh_dims) |
//! | buckets of `bucket_cap_mb`, 1 MiB first and then 25 MiB | buckets of complete units, by the same sizes |
//! | `find_unused_parameters=True` | the default; [`with_unused_parameters_refused`](DataParallel::with_unused_parameters_refused) makes an unused parameter an error |
//! | `broadcast_buffers=True`, the default | [`with_forward_sync_buffers`](DataParallel::with_forward_sync_buffers), not the default |
//! | `no_sync()` | [`FsdpModule::no_sync`] |
//! | `register_comm_hook` | [`with_gradient_hook`](DataParallel::with_gradient_hook) |
//! | `join()` | [`Join`] |
//!
//! The [guide](crate::book::data_parallel) has the complete table.
//!
//! # Units and buckets
//! Gradients are averaged during backward only if [`unit`](fn@crate::fsdp::unit) is around the
//! model's forward. One call is enough. Without it, all gradients are averaged at the end of
//! backward.
//!
//! The units are the top-level modules of the model and the items of its top-level lists, or the
//! modules that [`with_units`](DataParallel::with_units) names. A *bucket* consists of consecutive
//! units, in the order in which backward reaches them. They share one all-reduce:
//!
//! ```text
//!   backward computes   head   block 3 │ block 2   block 1   block 0 │ embedding
//!   buckets             └─── 1 MiB ────┘ └───────── 25 MiB ──────────┘ └ the rest ┘
//!   all-reduce                           ├── head, block 3 ──┤         ├ blocks 2 to 0 ┤├ embedding ┤
//! ```
//!
//! When a bucket has its number of bytes, the rank waits for the all-reduce of the bucket before
//! it, and then posts this one's. The last one is posted when backward ends. A unit is never
//! divided: a bucket ends with the unit that fills it.
//! [`with_bucket_bytes`](DataParallel::with_bucket_bytes) sets the sizes.
//!
//! Ranks that take different branches must nevertheless enter the same units: use
//! [`with_one_unit`](DataParallel::with_one_unit).
//!
//! # Gradient hooks
//! A [`GradientHook`] reduces a [`GradientBucket`] in place of the all-reduce, for example with
//! fewer bytes:
//!
//! | hook | sends | loses |
//! |---|---|---|
//! | none, or [`PlainAllReduce`] | gradients in their element type | nothing |
//! | [`Compress`] | gradients in `F16` or `BF16` | rounds before and after the sum |
//! | [`PowerSgd`] | two narrow matrices for each gradient | what the matrices cannot express, which is added to the next gradient |
//! | [`Quantized`] | 8 bits for each element | rounds to 256 levels |
//!
//! Set a hook with [`with_gradient_hook`](DataParallel::with_gradient_hook), or at run time with
//! [`FsdpModule::set_gradient_hook`]. A hook must return bit-identical gradients on all ranks.
//!
//! # Ranks with different numbers of batches
//! [`Join`] trains until the last rank has no further batch. A rank that has run out computes on
//! its last batch, with weight 0, and so takes part in the collectives of the others. By default, a
//! step averages over the ranks that have a batch. Where possible, give every rank the same number
//! of batches: a [`DistributedSampler`](crate::data::DistributedSampler) drops rows that do not
//! fill a batch, or pads them ([`LastBatch`](crate::data::LastBatch)).
//!
//! # Invariants
//! 1. Parameters have the values of the mesh's first rank at first. On processors of one kind, they
//!    are bit-identical on all ranks after each step.
//! 2. A gradient is the average over all ranks, unless [`FsdpModule`] sets another divisor, a
//!    weight or a hook. On groups whose size is a power of two, it is bit-identical to the gradient
//!    of `fully_shard`.
//! 3. Units are reduced in buckets: one all-reduce for consecutive units, the same on all ranks.

mod compress;
mod config;
mod error;
mod join;
mod power_sgd;
mod quantized;

pub use compress::{Compress, PlainAllReduce};
pub use config::DataParallel;
pub use error::JoinError;
pub use join::{Join, JoinedBatch};
pub use power_sgd::PowerSgd;
pub use quantized::Quantized;

pub use crate::param::{GradientBucket, GradientHook};

use std::panic::Location;

use burn::module::Module;
use itertools::Itertools;

use crate::Result;
use crate::fsdp::{FsdpModule, distribute, origin};
use crate::mesh::DeviceMesh;
use crate::param::ModelScan;

/// Replicates the parameters of any burn module over the ranks of `mesh`, each of which trains on
/// its own rows.
///
/// The model's type does not change, and each rank keeps the full parameters. Parameters and
/// buffers get the values of the mesh's first rank. In backward, gradients are averaged in buckets:
/// consecutive units share one all-reduce, which runs while the gradients of the units before them
/// are computed ([`DataParallel::with_bucket_bytes`]). For that, write
/// [`unit`](fn@crate::fsdp::unit) around the model's forward. The units are the modules that
/// [`with_units`](DataParallel::with_units) names; by default, the top-level modules and the items
/// of top-level lists. Without `unit`, all gradients are averaged at the end of backward.
///
/// Gradients are accumulated without communication by
/// [`FsdpModule::no_sync`](crate::fsdp::FsdpModule::no_sync). Everything else is as
/// [`fully_shard`](crate::fsdp::fully_shard) describes it: lazy parameters, nested calls, tensor
/// parallelism, replaced parameters, LoRA. Modules inside that `fully_shard` has sharded before
/// stay sharded, and a model with replicated modules inside can be sharded.
///
/// # Collective
/// Every rank of the mesh must call it with an equal model and configuration.
///
/// # Errors
/// Those of [`fully_shard`](crate::fsdp::fully_shard), and
/// [`ParamError::NotSharded`](crate::fsdp::ParamError::NotSharded) for a hook if all parameters are
/// ignored.
#[track_caller]
pub fn replicate<M: Module>(model: M, mesh: &DeviceMesh, config: DataParallel) -> Result<M> {
    let hook = config.hook.clone();
    let config = config.of(mesh, || top_level_modules(&ModelScan::of(&model)));
    let origin = origin::<M>("replicated", Location::caller());
    let model = distribute(model, mesh, config, "replicate", &origin)?;
    if let Some(hook) = hook {
        FsdpModule::of(&model)?.set_gradient_hook(hook);
    }
    Ok(model)
}

/// Returns the paths of the modules that are fields of the model, or items of its lists.
fn top_level_modules(scan: &ModelScan) -> Vec<String> {
    let module = |path: &[String]| {
        let (_parameter, modules) = path.split_last()?;
        let is_index = |part: &&String| part.bytes().all(|byte| byte.is_ascii_digit());
        let len = 1 + modules.iter().skip(1).take_while(is_index).count();
        modules.get(..len).map(|module| module.join("."))
    };
    let paths = scan.params.iter().map(|param| &param.path[..]);
    paths.filter_map(module).unique().collect()
}
