//! [`CheckpointError`]: a checkpoint that was not saved or loaded.

use std::path::PathBuf;

/// Reason why a checkpoint was not saved or loaded. Every rank of the call gets an error; that of a rank whose own part
/// succeeded is the error of the first rank that failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file or folder could not be read or written.
    #[error("rank {rank} could not {action} {}: {reason}", path.display())]
    Io {
        /// Global rank that failed.
        rank: usize,
        /// What it was doing, such as `write`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Message of the operating system.
        reason: String,
    },
}
