//! [`CheckpointError`]: a checkpoint that was not saved or loaded.

use std::io;
use std::path::{Path, PathBuf};

use itertools::Itertools;
use serde::{Deserialize, Serialize};

/// Reason why a checkpoint was not saved or loaded. If one rank fails, every rank gets the error of the first rank that
/// failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file or folder could not be read or written.
    #[error("rank {rank} could not {action} {}: {reason}", path.display())]
    Io {
        /// Global rank that failed.
        rank: usize,
        /// Action that failed, such as `write`.
        action: String,
        /// The file or folder.
        path: PathBuf,
        /// Message of the operating system.
        reason: String,
    },
    /// A complete checkpoint has this name. It is never overwritten.
    #[error("{} is a complete checkpoint, which is never overwritten. Save under another name, or remove it first", path.display())]
    Exists {
        /// Folder of the checkpoint.
        path: PathBuf,
    },
    /// The folder contains files that no save wrote.
    #[error("{} contains `{name}`, which is not part of a checkpoint. Save into a folder that does not exist", path.display())]
    Occupied {
        /// The folder.
        path: PathBuf,
        /// One of the files.
        name: String,
    },
    /// The path is not the same folder for all ranks.
    #[error(
        "{} is not the same folder on rank {rank} as on rank {of}. Use a folder of a file system that all hosts share, and an \
         absolute path", path.display()
    )]
    NotShared {
        /// The folder.
        path: PathBuf,
        /// First global rank that sees another folder.
        rank: usize,
        /// Global rank that created or read it.
        of: usize,
    },
    /// Another program saved under the same name at the same time.
    #[error("another program saved into {} at the same time. Give each program a folder of its own", path.display())]
    Replaced {
        /// Folder of the checkpoint.
        path: PathBuf,
    },
    /// An [`AsyncCheckpointer`](super::AsyncCheckpointer) of the same manager is writing a checkpoint.
    #[error(
        "step {step} cannot be saved into {} while step {in_flight} is written there. Save it by the `AsyncCheckpointer`, or call \
         its `finish` first", path.display()
    )]
    InFlight {
        /// Folder of the run.
        path: PathBuf,
        /// Step that was to be saved.
        step: u64,
        /// Step that is being written.
        in_flight: u64,
    },
    /// The folder is not a complete checkpoint.
    #[error(
        "{} is not a complete checkpoint: it has no manifest.json. The save may have been interrupted, or the folder contains \
         checkpoints: open one of them", path.display()
    )]
    Incomplete {
        /// The folder.
        path: PathBuf,
    },
    /// The manifest is damaged, or was not written by a save.
    #[error("{} cannot be used: {reason}. Load another checkpoint", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// Description of the damage.
        reason: String,
    },
    /// The manifest would be too large to be read again.
    #[error(
        "the manifest would have {bytes} bytes, and may have {limit}. It contains the values of `with_value` and, for every rank, \
         of `with_rank_value`: save large ones as tensors"
    )]
    ManifestSize {
        /// Bytes that it would have.
        bytes: u64,
        /// Most that it may have.
        limit: u64,
    },
    /// Stored bytes are not those that were saved.
    #[error(
        "bytes {first}..{last} of {} are damaged: their checksum differs. They belong to `{key}`. Load another checkpoint, or \
         restore the file", path.display()
    )]
    Corrupt {
        /// The damaged file.
        path: PathBuf,
        /// Tensor to which the bytes belong.
        key: String,
        /// First byte of the damaged block, counted from the start of the file.
        first: u64,
        /// First byte after it.
        last: u64,
    },
    /// A file is shorter or longer than when it was saved.
    #[error(
        "{} has {found} bytes, but {expected} were saved: it was truncated or replaced. Load another checkpoint, or restore the \
         file", path.display()
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes that it has.
        found: u64,
        /// Bytes that it had.
        expected: u64,
    },
    /// A file is not in the format of safetensors, or its index does not fit it.
    #[error("{} cannot be read as safetensors: {reason}", path.display())]
    Safetensors {
        /// The file, or the index.
        path: PathBuf,
        /// Description of the damage.
        reason: String,
    },
    /// A partial DTensor has no values to be saved before it is reduced.
    #[error("`{key}` is partial, with placements {placements}: its values are not reduced yet. Redistribute it first")]
    Partial {
        /// Key of the tensor.
        key: String,
        /// Placements of the tensor.
        placements: String,
    },
    /// A dtype that the file format does not have.
    #[error(
        "`{key}` has the dtype {dtype}, which safetensors does not have. Save it dequantized, or cast to another dtype"
    )]
    DType {
        /// Key of the tensor.
        key: String,
        /// Dtype of the tensor.
        dtype: String,
    },
    /// Two entries of one state have the same key.
    #[error("the state has two entries `{key}`. Give one of them another prefix")]
    Duplicate {
        /// The key.
        key: String,
    },
    /// Ranks hold different tensors or values under one key.
    #[error("`{key}` differs between ranks: rank {rank} has {found}, and rank {of} has {expected}")]
    Disagree {
        /// The key.
        key: String,
        /// Global rank that differs.
        rank: usize,
        /// Description of its tensor or value.
        found: String,
        /// Global rank with which it was compared.
        of: usize,
        /// Description of that rank's tensor or value.
        expected: String,
    },
    /// Shards of the ranks are not a partition of the tensor.
    #[error(
        "the shards of `{key}` on all ranks have {found} elements, but its global shape {shape:?} has {expected}. Save DTensors of \
         one mesh under one key"
    )]
    Cover {
        /// Key of the tensor.
        key: String,
        /// Global shape.
        shape: Vec<usize>,
        /// Number of elements of the distinct shards.
        found: usize,
        /// Number of elements of the tensor.
        expected: usize,
    },
    /// Two ranks have different shards that share elements.
    #[error(
        "shards of `{key}`, of global shape {shape:?}, overlap on different ranks. Save DTensors of one layout under one key"
    )]
    Overlap {
        /// Key of the tensor.
        key: String,
        /// Global shape.
        shape: Vec<usize>,
    },
    /// The checkpoint does not contain a value.
    #[error("the checkpoint has no value `{key}`. It has: {present}")]
    NoValue {
        /// Key that was asked for.
        key: String,
        /// Keys of the values.
        present: String,
    },
    /// A value could not be serialized, or is not of the type that was asked for.
    #[error("value `{key}`: {reason}")]
    Value {
        /// Key of the value.
        key: String,
        /// Message of serde.
        reason: String,
    },
    /// Each rank has a value of its own, and there are more or fewer ranks than when they were saved.
    #[error(
        "`{key}` is a value of each of {saved} ranks, which {ranks} ranks cannot have. Leave it out, or use {saved} ranks"
    )]
    RankValues {
        /// Key of the values.
        key: String,
        /// Number of ranks that saved them.
        saved: usize,
        /// Number of ranks now.
        ranks: usize,
    },
    /// The state has no step, by which the checkpoint would be named.
    #[error("the state has no step, by which its checkpoint is named. Add `State::with_step`")]
    NoStep,
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

impl CheckpointError {
    /// Creates the error of global rank `rank`, which could not do `action` with the file or folder `path`.
    pub(super) fn io(rank: usize, action: &str, path: &Path, error: &io::Error) -> Self {
        Self::Io { rank, action: action.into(), path: path.into(), reason: error.to_string() }
    }
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
