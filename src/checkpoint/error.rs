//! [`CheckpointError`]: a checkpoint that was not saved or loaded.

use std::path::PathBuf;

use itertools::Itertools;

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
    /// The rank whose values are to be loaded passed none.
    #[error("rank {rank} is the first rank of the mesh, whose values are loaded, but it passed `None`")]
    NoValues {
        /// Global rank.
        rank: usize,
    },
    /// The saved tensors do not fit the model.
    #[error(
        "what was saved does not fit the model. {}To load the rest, use `LoadOptions::with_partial`; to read other keys or \
         to leave parameters out, `LoadOptions::with_renamed`",
        misfits(missing, unexpected, mismatched)
    )]
    Keys {
        /// Paths of the model that are not saved.
        missing: Vec<String>,
        /// Saved keys that are not in the model.
        unexpected: Vec<String>,
        /// One text for each parameter of another shape or kind, with its path.
        mismatched: Vec<String>,
    },
}

/// Returns one sentence for each kind of keys that do not fit.
fn misfits(missing: &[String], unexpected: &[String], mismatched: &[String]) -> String {
    let quoted = |paths: &[String]| paths.iter().map(|path| format!("`{path}`")).join(", ");
    let parts = [
        ("Not saved", quoted(missing)),
        ("Not in the model", quoted(unexpected)),
        ("Of another shape or kind", mismatched.join("; ")),
    ];
    parts.iter().filter(|(_, list)| !list.is_empty()).map(|(what, list)| format!("{what}: {list}. ")).collect()
}
