//! Checkpoints: a distributed model, its optimizer and other state in files, written by all ranks and loaded on any mesh.

mod capture;
mod error;
mod options;
mod state_dict;

pub use error::CheckpointError;
pub use options::{KeyReport, LoadOptions};
pub use state_dict::StateDict;
