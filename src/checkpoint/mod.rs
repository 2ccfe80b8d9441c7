//! Checkpoints: a distributed model, its optimizer and other state in files, written by all ranks and loaded on any mesh.

mod error;
mod fs;

pub use error::CheckpointError;
