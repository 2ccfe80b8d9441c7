//! Checkpoints: a distributed model, its optimizer and other state in files, written by all ranks
//! and loaded on any mesh.
//!
//! A program that saves after each step, and resumes from the latest checkpoint, possibly on another
//! number of ranks:
//!
//! ```
//! # use std::path::Path;
//! # use burn::nn::{Linear, LinearConfig};
//! # use burn::optim::{AdamWConfig, GradientsParams};
//! # use burn::tensor::{Device, Tensor};
//! # use burn_dtensor::optim::{ShardedOptimizer, sharded};
//! use burn_dtensor::checkpoint::{CheckpointManager, LoadOptions, State};
//! # use burn_dtensor::prelude::*;
//!
//! fn train(world: &World, directory: &Path, steps: u64) -> Result<u64> {
//!     // .. a mesh, a sharded model on it, and its optimizer ..
//! #   let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
//! #   let device = world.device().clone().autodiff();
//! #   let mut model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
//! #   let mut optim = sharded(AdamWConfig::new());
//!     let run = CheckpointManager::new(directory, &mesh).with_keep(3); // step-1, step-2, ..
//!     let mut first = 0;
//!     if let Some(checkpoint) = run.latest()? {
//!         (model, _) = checkpoint.load_model("model", model, &LoadOptions::new())?;
//!         let (state, _) = checkpoint.load_optimizer("optimizer", &model, &LoadOptions::new())?;
//!         optim = optim.load_state(&model, state)?;
//!         first = checkpoint.step().expect("every save of this run has a step");
//!     }
//!     for step in first..steps {
//!         model = train_step(model, &mut optim, &device)?;
//!         let state = State::new(&mesh).with_step(step + 1).with_model("model", &model)?;
//!         run.save(&state.with_optimizer("optimizer", &optim.state(&model)?)?)?;
//!     }
//!     Ok(first)
//! }
//!
//! # fn train_step(model: Linear, optim: &mut ShardedOptimizer, device: &Device) -> Result<Linear> {
//! #     let loss = unit(&model, Tensor::<2>::ones([1, 8], device), |model, x| model.forward(x)).square().sum();
//! #     let grads = GradientsParams::from_grads(loss.backward(), &model);
//! #     optim.step(1e-3, model, grads)
//! # }
//! # let directory = std::env::temp_dir().join(format!("burn-dtensor-checkpoints-{}", std::process::id()));
//! launch(Launch::threads(4), |world| train(world, &directory, 2))?;
//! let firsts = launch(Launch::threads(3), |world| train(world, &directory, 4))?; // on three ranks
//! assert_eq!(firsts, [(0, 2), (1, 2), (2, 2)]); // each rank resumed after step 2
//! # std::fs::remove_dir_all(directory)?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! | purpose | use |
//! |---|---|
//! | choose what is saved | [`State`]: models, optimizers, tensors, and [values](State::with_value) that serde can serialize |
//! | save one checkpoint | [`save`](save()) |
//! | save the checkpoints of a run, and remove old ones | [`CheckpointManager`], which can also keep the best one ([`Best`]) |
//! | save while training continues | [`AsyncCheckpointer`] |
//! | load | [`CheckpointManager::latest`] or [`Checkpoint::open`], then [`load_model`](Checkpoint::load_model), [`load_optimizer`](Checkpoint::load_optimizer), [`load_tensor`](Checkpoint::load_tensor), [`value`](Checkpoint::value) |
//! | load parameters that were renamed or added, or state of another dtype | [`LoadOptions`] |
//! | load models in files of other frameworks | [`SafetensorsWeights`] |
//! | move tensors of a model without files | [`StateDict`]: a model's tensors by path |
//! | continue from an older step | [`CheckpointManager::set_back`] |
//! | rewrite a checkpoint for another number of ranks | [`Checkpoint::reshard`] |
//! | examine, export or set back without a launch | [`inspect`](inspect()), [`verify`](verify()), [`consolidate`](consolidate()), [`latest`], [`set_back`] |
//!
//! Saving, opening and loading are collective: every rank of the mesh calls them. With tensor
//! parallelism, pass the mesh of which the model's meshes are slices. In several processes, the
//! directory of a checkpoint is on a file system that all hosts share.
//!
//! # Invariants
//!
//! 1. A save writes the ranks' files and then the manifest into a directory of its own, and renames
//!    this to the checkpoint's name, each durable before the next. So a directory of that name is a
//!    complete checkpoint, also after a power loss. Only then are old checkpoints removed, which get
//!    another name first.
//! 2. A load maps the target shards to byte ranges of the files, and each rank reads its own.
//! 3. All loads of a model match its parameters with what is saved by the same rules, and list
//!    everything that does not fit in one error, [`CheckpointError::Keys`].
//! 4. An error of a save or a load is the same on all ranks.

mod assign;
mod asynchronous;
mod best;
mod capture;
mod claim;
mod consolidate;
mod dtype;
mod error;
mod fragments;
mod fs;
mod inspect;
mod load;
mod manager;
mod manifest;
mod matching;
mod open_save;
mod optimizer;
mod options;
mod os_path;
mod read_options;
mod read_plan;
mod read_stats;
mod reader;
mod region;
mod reshard;
mod run_folder;
mod safetensors_file;
mod safetensors_weights;
mod save;
mod save_plan;
mod save_report;
mod save_values;
mod state;
mod state_dict;
mod tensor_files;
#[cfg(test)]
mod tests;
mod verify;
mod weight_source;

pub use asynchronous::{AsyncCheckpointer, AsyncSaveReport};
pub use best::Best;
pub use consolidate::{ConsolidateOptions, ConsolidateReport, consolidate};
pub use error::{CheckpointError, LoadKind};
pub use inspect::{CheckpointSummary, ChunkSummary, FileSummary, TensorSummary, inspect};
pub use load::Checkpoint;
pub use manager::{CheckpointManager, latest, set_back};
pub use matching::KeyReport;
pub use options::{LoadOptions, StateDTypes};
pub use read_options::ReadOptions;
pub use read_stats::{ClassStats, ReadStats, RunClass};
pub use reshard::ReshardOptions;
pub use safetensors_weights::SafetensorsWeights;
pub use save::save;
pub use save_report::SaveReport;
pub use state::State;
pub use state_dict::StateDict;
pub use verify::{Verification, verify};
pub use weight_source::WeightSource;
