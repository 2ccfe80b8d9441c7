//! Data parallelism by name: every rank holds the full model, and gradients are averaged.
//!
//! [`replicate`] is for readers who know PyTorch's `DistributedDataParallel`. It places every
//! parameter as `Replicate`, in the units of [`fully_shard`](crate::fsdp::fully_shard): the same
//! backward, reducer and events, so that everything that [`fsdp`](crate::fsdp) has for units works
//! here, too.
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
//! # Invariants
//! 1. Parameters have the values of the mesh's first rank at first, and the same bits on all ranks
//!    after each step.
//! 2. A gradient is the average over all ranks, unless [`FsdpModule`] sets
//!    another divisor. On groups whose size is a power of two, it has the bits of `fully_shard`.
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
/// rows of its own.
///
/// The model's type does not change, and each rank keeps the full parameters. They become those of
/// the mesh's first rank, and so do buffers. In backward, gradients are averaged in buckets:
/// consecutive units share one all-reduce, which runs while the gradients of the units before them
/// are computed ([`DataParallel::with_bucket_bytes`]). For that, open the model's forward with
/// [`unit`](fn@crate::fsdp::unit); modules inside become units by
/// [`with_units`](DataParallel::with_units), or else its top-level modules and the items of its
/// top-level lists. Without `unit`, all gradients are averaged at the end of backward.
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
