//! Checkpoints: a distributed model, its optimizer and other state in files, written by all ranks and loaded on any mesh.

mod dtype;
mod error;
mod fs;
mod manifest;
mod region;

pub use error::CheckpointError;
