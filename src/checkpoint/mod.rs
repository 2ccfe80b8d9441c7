//! Checkpoints: a distributed model, its optimizer and other state in files, written by all ranks and loaded on any mesh.

mod dtype;
mod error;
mod fs;
mod manifest;
mod read_options;
mod read_plan;
mod read_stats;
mod reader;
mod region;
mod safetensors_file;

pub use error::CheckpointError;
pub use read_options::ReadOptions;
pub use read_stats::{ClassStats, ReadStats, RunClass};
