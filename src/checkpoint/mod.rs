//! Checkpoints: a distributed model, its optimizer and other state in files, written by all ranks and loaded on any mesh.

mod agree;
mod assign;
mod asynchronous;
mod capture;
mod consolidate;
mod dtype;
mod error;
mod fs;
mod inspect;
mod load;
mod manager;
mod manifest;
mod options;
mod read_options;
mod read_plan;
mod read_stats;
mod reader;
mod region;
mod reshard;
mod safetensors_file;
mod safetensors_weights;
mod save;
mod state;
mod state_dict;
#[cfg(test)]
mod tests;
mod verify;

pub use asynchronous::{AsyncCheckpointer, AsyncSaveReport};
pub use consolidate::{ConsolidateOptions, ConsolidateReport, consolidate};
pub use error::CheckpointError;
pub use inspect::{CheckpointSummary, ChunkSummary, FileSummary, TensorSummary, inspect};
pub use load::Checkpoint;
pub use manager::CheckpointManager;
pub use options::{KeyReport, LoadOptions};
pub use read_options::ReadOptions;
pub use read_stats::{ClassStats, ReadStats, RunClass};
pub use safetensors_weights::{SafetensorsWeights, WeightSource};
pub use save::{SaveReport, save};
pub use state::State;
pub use state_dict::StateDict;
pub use verify::{Verification, verify};
