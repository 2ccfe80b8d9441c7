//! burn's optimizers on distributed parameters, and their state by path.
//!
//! ```text
//! blocks.0.weight                      [8, 6] as [S(0)]     the parameter
//! blocks.0.weight.momentum.moment_1    [8, 6] as [S(0)]     what AdamW remembers of it
//! blocks.0.weight.momentum.moment_2    [8, 6] as [S(0)]
//! blocks.0.weight.momentum.time        3
//! ```
//!
//! A model that was sharded or parallelized is stepped by burn's own
//! [`ModuleOptimizer`](burn::optim::ModuleOptimizer), and [`optimizer_state`] is what that remembers. [`sharded`] makes one
//! that is right on shards, or does not compile, and has Muon of whole matrices. Parameters that
//! are [`DTensor`](crate::dtensor::DTensor)s without a module are stepped by a [`DTensorOptimizer`]. Either's state is
//! an [`OptimizerState`]: DTensors laid out as their parameters, by the parameters' paths and burn's names of its
//! fields. It follows parameters to another layout or mesh ([`OptimizerState::redistribute`]), and its whole, a
//! [`FullOptimizerState`], is saved and [laid out](FullOptimizerState::distribute) again on any mesh.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::Tensor;
//! use burn_dtensor::optim::{FullOptimizerState, load_optimizer_state, optimizer_state, parameter_specs};
//! use burn_dtensor::prelude::*;
//!
//! // Two ranks train, and three go on.
//! let saved = launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
//!     let device = world.device().clone().autodiff();
//!     let mut model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
//!     let mut optim = AdamWConfig::new().init();
//!     let loss = model.forward(Tensor::<2>::ones([1, 8], &device)).square().sum();
//!     let grads = GradientsParams::from_grads(loss.backward(), &model);
//!     model = optim.step(1e-3, model, grads);
//!     let state = optimizer_state(&optim, &model)?;
//!     let moment = state.tensor::<2>("weight.momentum.moment_1").expect("AdamW has one");
//!     assert_eq!(moment.spec(), model.weight.shard().expect("it is sharded").spec());
//!     state.full()?.into_bytes()
//! })?;
//! // Every rank has returned the same.
//! let (_, saved) = &saved[0];
//!
//! launch(Launch::threads(3), |world| {
//!     let mesh = DeviceMesh::new(world, [3], ["shard"])?;
//!     let device = world.device().clone().autodiff();
//!     let model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
//!     let full = FullOptimizerState::from_bytes(saved.clone())?;
//!     let state = full.distribute(parameter_specs(&model)?)?;
//!     let optim = load_optimizer_state(AdamWConfig::new().init(), &model, state)?;
//!     # let _ = optim;
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! # Invariants
//! 1. An optimizer that works element by element steps parts as it steps the whole, to the bit, and sends nothing.
//! 2. A state tensor of the parameter's shape has the parameter's layout. One of another shape is whole on every rank.
//! 3. burn's Muon of a model on any mesh is that of one device, to the bit where gradients are.
//! 4. A state that does not fit parameter or optimizer is an error; nothing of it is left out.

mod clip;
mod dtensors;
mod ema;
mod error;
mod exact;
mod full;
mod models;
mod muon;
mod route;
mod sharded;
mod state;

pub use burn_pack::Scalar;
pub use dtensors::DTensorOptimizer;
pub use ema::ema;
pub use error::OptimError;
pub use exact::ExactOnShards;
pub use full::FullOptimizerState;
pub use models::{load_optimizer_state, optimizer_state, parameter_specs};
pub use sharded::{ShardedOptimizer, sharded};
pub use state::{OptimizerState, StateTensor};
