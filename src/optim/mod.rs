//! burn's optimizers for distributed parameters, and their state by path.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::Tensor;
//! use burn_dtensor::optim::sharded;
//! use burn_dtensor::prelude::*;
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
//!     let device = world.device().clone().autodiff();
//!     let mut model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
//!     let mut optim = sharded(AdamWConfig::new());
//!     for _ in 0..3 {
//!         let x = Tensor::<2>::ones([1, 8], &device);
//!         let loss = unit(&model, x, |model, x| model.forward(x)).square().mean();
//!         let grads = GradientsParams::from_grads(loss.backward(), &model);
//!         model = optim.step(1e-3, model, grads)?;
//!     }
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! | to | use |
//! |---|---|
//! | step a model that is sharded or parallelized | [`sharded`], a [`ShardedOptimizer`] |
//! | step matrices with Muon | [`ShardedOptimizer::with_muon`] |
//! | unscale and clip while a step reads the gradients | [`ShardedOptimizer::step_scaled`] with a [`GradFactor`] |
//! | step parameters during backward | [`ShardedOptimizer::backward`] |
//! | see what steps which group | [`ShardedOptimizer::describe`] |
//! | use burn's `Learner` | [`ShardedOptimizer::into_module_optimizer`] |
//! | step [`DTensor`](crate::dtensor::DTensor)s without a module | [`DTensorOptimizer`] |
//! | keep a moving average of the weights | [`ema`] |
//! | read, move and load state | [`OptimizerState`], [`FullOptimizerState`] |
//!
//! [`sharded`] accepts only optimizers that are exact on shards; others do not compile. AdamW,
//! Adam, Lion and Sgd, built from their configurations, make one pass over memory on the CPU
//! ([`FusedAdamW`], [`FusedAdam`], [`FusedLion`], [`FusedSgd`]). Their results are burn's, bit for
//! bit. On GPUs one kernel steps a list of parameters, with results within a few units in the last
//! place of burn's. The other optimizers use burn's own step.
//!
//! # State
//! State is named by the parameters' paths and burn's field names. Tensors are laid out like their
//! parameters:
//!
//! ```text
//! blocks.0.weight                      [8, 6] as [S(0)]     the parameter
//! blocks.0.weight.momentum.moment_1    [8, 6] as [S(0)]     AdamW's state of it
//! blocks.0.weight.momentum.moment_2    [8, 6] as [S(0)]
//! blocks.0.weight.momentum.time        3
//! ```
//!
//! [`OptimizerState::redistribute`] moves it to another layout or mesh, and
//! [checkpoints](crate::checkpoint) save its shards. [`FullOptimizerState`] has full tensors as
//! bytes, which [`FullOptimizerState::distribute`] distributes on any mesh:
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::Tensor;
//! use burn_dtensor::optim::{FullOptimizerState, parameter_specs, sharded};
//! use burn_dtensor::prelude::*;
//!
//! // Two ranks train; three ranks resume.
//! let saved = launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
//!     let device = world.device().clone().autodiff();
//!     let mut model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
//!     let mut optim = sharded(AdamWConfig::new());
//!     let x = Tensor::<2>::ones([1, 8], &device);
//!     let loss = unit(&model, x, |model, x| model.forward(x)).square().sum();
//!     let grads = GradientsParams::from_grads(loss.backward(), &model);
//!     model = optim.step(1e-3, model, grads)?;
//!     let state = optim.state(&model)?;
//!     let moment = state.tensor::<2>("weight.momentum.moment_1").expect("AdamW has one");
//!     assert_eq!(moment.spec(), model.weight.shard().expect("it is sharded").spec());
//!     state.full()?.into_bytes()
//! })?;
//! // Every rank returned the same bytes.
//! let (_, saved) = &saved[0];
//!
//! launch(Launch::threads(3), |world| {
//!     let mesh = DeviceMesh::new(world, [3], ["shard"])?;
//!     let device = world.device().clone().autodiff();
//!     let model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
//!     let full = FullOptimizerState::from_bytes(saved.clone())?;
//!     let state = full.distribute(parameter_specs(&model)?)?;
//!     let optim = sharded(AdamWConfig::new()).load_state(&model, state)?;
//!     # let _ = optim;
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! # Invariants
//! 1. On the CPU, an optimizer that works element by element steps a shard exactly (bitwise) as it
//!    steps the full parameter. On GPUs, fused steps may differ from burn's by a few units in the
//!    last place. These steps do not communicate.
//! 2. A state tensor of the parameter's shape has the parameter's layout. A state tensor of another
//!    shape is replicated.
//! 3. Muon gives the same result on any mesh as on one device, bitwise if the gradients are.
//! 4. State that does not match the parameter or the optimizer is an error; no state is dropped
//!    silently.

mod clip;
mod description;
mod dtensors;
mod ema;
mod error;
mod exact;
mod factor;
mod full;
mod fused;
mod in_backward;
mod models;
mod muon;
mod optimizer_kind;
mod per_param;
mod realigned;
mod route;
mod sharded;
mod state;
mod state_exchange;

pub use burn_pack::Scalar;
pub use description::OptimizerDescription;
pub use dtensors::DTensorOptimizer;
pub use ema::ema;
pub use error::OptimError;
pub use exact::ExactOnShards;
pub use factor::GradFactor;
pub(crate) use factor::note_scaled;
pub use full::FullOptimizerState;
pub use fused::{FusedAdam, FusedAdamW, FusedLion, FusedSgd, FusedSgdState};
#[cfg(feature = "train")]
pub(crate) use models::recorded_state;
pub use models::{load_optimizer_state, optimizer_state, parameter_specs};
pub use sharded::{ShardedOptimizer, sharded};
pub use state::OptimizerState;
pub(crate) use state::owner;
