//! [`CheckpointError`]: a checkpoint that was not saved or loaded.

use std::io;
use std::path::{Path, PathBuf};

use burn::tensor::DType;
use itertools::Itertools;
use serde::{Deserialize, Serialize};

use super::os_path;
use crate::pattern::PathPattern;

/// Most keys that an error lists.
const LISTED: usize = 16;

/// Reason why a checkpoint was not saved or loaded. If one rank fails, every rank gets the error of
/// the first rank that failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file or folder could not be read or written.
    #[error(
        "rank {rank} could not {action} {}: {reason}. Check the path, its permissions and the free space, on that rank's host",
        path.display()
    )]
    Io {
        /// Global rank that failed.
        rank: usize,
        /// Action that failed, such as `write`.
        action: String,
        /// The file or folder.
        #[serde(with = "os_path")]
        path: PathBuf,
        /// Message of the operating system.
        reason: String,
    },
    /// A complete checkpoint has this name. It is never overwritten.
    #[error("{} is a complete checkpoint, which is never overwritten. Save under another name, or remove it first", path.display())]
    Exists {
        /// Folder of the checkpoint.
        #[serde(with = "os_path")]
        path: PathBuf,
    },
    /// The folder contains files that no save wrote.
    #[error("{} contains `{name}`, which is not part of a checkpoint. Save into a folder that does not exist", path.display())]
    Occupied {
        /// The folder.
        #[serde(with = "os_path")]
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
        #[serde(with = "os_path")]
        path: PathBuf,
        /// First global rank that sees another folder.
        rank: usize,
        /// Global rank that created or read it.
        of: usize,
    },
    /// Another program removed the files of a save while they were written. The save has failed.
    #[error(
        "the checkpoint was not saved: another program removed {} while this one wrote there. Let only one program save into a \
         folder", path.display()
    )]
    Replaced {
        /// Folder into which the checkpoint was written.
        #[serde(with = "os_path")]
        path: PathBuf,
    },
    /// An [`AsyncCheckpointer`](super::AsyncCheckpointer) of a rank's process is writing a
    /// checkpoint into the same folder.
    #[error(
        "step {step} cannot be saved into {} while step {in_flight} is written there. Save it by the `AsyncCheckpointer`, or call \
         its `finish` first", path.display()
    )]
    InFlight {
        /// Folder of the run.
        #[serde(with = "os_path")]
        path: PathBuf,
        /// Step that was to be saved.
        step: u64,
        /// Step that is being written.
        in_flight: u64,
    },
    /// A run has a checkpoint of a later step than the one that was to be saved.
    #[error(
        "step {step} cannot be saved into {}, which has step {later}: the latest checkpoint of a run is the newest. To continue from \
         an older one, first set the later ones aside with `CheckpointManager::set_back`, `checkpoint::set_back` or \
         `checkpoint set-back DIR STEP`", path.display()
    )]
    LaterStep {
        /// Folder of the run.
        #[serde(with = "os_path")]
        path: PathBuf,
        /// Step that was to be saved.
        step: u64,
        /// The newest step.
        later: u64,
    },
    /// A file `latest`, which earlier versions wrote, does not name the newest checkpoint.
    #[error(
        "{} contains {content}, but {}. The latest checkpoint of a run is the newest. To go back to an older one, set the later \
         ones aside with `CheckpointManager::set_back`, `checkpoint::set_back` or `checkpoint set-back DIR STEP`; with the newest \
         as the step, this only removes the file", path.display(), describe_newest(*newest)
    )]
    LatestFile {
        /// The file.
        #[serde(with = "os_path")]
        path: PathBuf,
        /// Description of its content.
        content: String,
        /// Step of the newest complete checkpoint.
        newest: Option<u64>,
    },
    /// A folder of another host's save may still be written.
    #[error(
        "{} may still be written by process {process} of another host. It is removed {hours} h after it was begun", path.display()
    )]
    MaybeLive {
        /// The folder.
        #[serde(with = "os_path")]
        path: PathBuf,
        /// Id of the process on its host.
        process: u32,
        /// Hours after which the save is taken for abandoned.
        hours: u64,
    },
    /// The folder is not a complete checkpoint.
    #[error(
        "{} is not a complete checkpoint: it has no manifest.json. The save may have been interrupted, or the folder contains \
         checkpoints: open one of them", path.display()
    )]
    Incomplete {
        /// The folder.
        #[serde(with = "os_path")]
        path: PathBuf,
    },
    /// The manifest is damaged, or was not written by a save.
    #[error("{} cannot be used: {reason}", path.display())]
    Manifest {
        /// The manifest.
        #[serde(with = "os_path")]
        path: PathBuf,
        /// Description of the damage, and the remedy.
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
        #[serde(with = "os_path")]
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
        #[serde(with = "os_path")]
        path: PathBuf,
        /// Bytes that it has.
        found: u64,
        /// Bytes that it had.
        expected: u64,
    },
    /// A file is not in the format of safetensors, or its index does not fit it.
    #[error("{} cannot be read as safetensors: {reason}. Load another file, or write it again", path.display())]
    Safetensors {
        /// The file, or the index.
        #[serde(with = "os_path")]
        path: PathBuf,
        /// Description of the damage.
        reason: String,
    },
    /// A partial DTensor has no values to be saved before it is reduced.
    #[error(
        "`{key}` is partial, with placements {placements}: its values are not reduced yet. Redistribute it first"
    )]
    Partial {
        /// Key of the tensor.
        key: String,
        /// Placements of the tensor.
        placements: String,
    },
    /// A tensor that is saved has a dtype that the file format does not have.
    #[error(
        "`{key}` has the dtype {dtype}, which safetensors does not have. Save it dequantized, or cast to another dtype"
    )]
    DType {
        /// Key of the tensor.
        key: String,
        /// Dtype of the tensor.
        dtype: String,
    },
    /// A key cannot be the name of a tensor in a safetensors file.
    #[error(
        "a tensor in a safetensors file cannot be named `{key}`: {reason}. Give it another key"
    )]
    Name {
        /// The key.
        key: String,
        /// Reason why it cannot be a name.
        reason: String,
    },
    /// A stored tensor has a dtype that burn does not have.
    #[error(
        "`{key}` is stored as {dtype}, which burn does not have. Leave it out, or convert it in the file"
    )]
    StoredDType {
        /// Key of the tensor.
        key: String,
        /// Dtype of the stored tensor.
        dtype: String,
    },
    /// A stored tensor has a number of dimensions that no tensor of burn has.
    #[error(
        "`{key}` has {dims} dimensions, and burn's tensors have 1 to 8. Leave it out, or reshape it in the file"
    )]
    Dims {
        /// Key of the tensor.
        key: String,
        /// Number of its dimensions.
        dims: usize,
    },
    /// A tensor is to be sharded in a dimension that it does not have.
    #[error(
        "`{key}` has the shape {shape:?}, and is to be sharded in dimension {dim}. Choose one of its dimensions, from 0 on"
    )]
    NoDim {
        /// Key of the tensor.
        key: String,
        /// The dimension.
        dim: usize,
        /// Global shape of the tensor.
        shape: Vec<usize>,
    },
    /// A stored tensor of booleans has other bytes than 0 and 1.
    #[error(
        "`{key}` has the dtype BOOL and contains the byte {byte}, which is neither 0 nor 1. Write it as 0 or 1, or as U8"
    )]
    NotBool {
        /// Key of the tensor.
        key: String,
        /// The first such byte.
        byte: u8,
    },
    /// A stored integer is not in the range of the dtype in which the model or the optimizer has
    /// it.
    #[error(
        "`{key}` contains {value}, which {dtype} cannot represent. Load it into a tensor of a wider dtype, or correct it"
    )]
    IntegerRange {
        /// Key of the tensor.
        key: String,
        /// The first such integer.
        value: String,
        /// Name of the dtype into which it is loaded.
        dtype: String,
    },
    /// A state dict that is added to a state has numbers, which it would not keep.
    #[error(
        "the state dict for `{key}` has numbers, such as `{number}`, and only its tensors would be saved. Add the state of an \
         optimizer with `State::with_optimizer`"
    )]
    Numbers {
        /// The key that is added.
        key: String,
        /// The first number.
        number: String,
    },
    /// A load of one key would find tensors that were saved under another.
    #[error(
        "`{key}` cannot be added to a state that has `{other}`: a load of one would find tensors of the other. Use keys of which \
         none equals or is below the other, such as `model` and `model_ema`"
    )]
    Nested {
        /// The key that is added.
        key: String,
        /// The key that the state has.
        other: String,
    },
    /// Two entries of one state have the same key.
    #[error("the state has two entries `{key}`. Give one of them another prefix")]
    Duplicate {
        /// The key.
        key: String,
    },
    /// Ranks hold different tensors or values under one key.
    #[error(
        "`{key}` differs between ranks: rank {rank} has {found}, and rank {of} has {expected}. Save the same on all ranks, or a \
         value of each rank with `State::with_rank_value`"
    )]
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
    /// An optimizer's state was saved for a parameter of another dtype.
    #[error(
        "the optimizer's state of `{param}` was saved for {saved}, and the parameter is {dtype} now. Load it into a model of \
         {saved}, or choose by `LoadOptions::with_state_dtypes` whether it is converted"
    )]
    StateDType {
        /// Path of the parameter.
        param: String,
        /// Dtype for which the state was saved.
        saved: String,
        /// Dtype of the parameter now.
        dtype: String,
    },
    /// The checkpoint has nothing under the key of a model.
    #[error(
        "the checkpoint has no tensors under `{key}`{}. It has tensors under {present}. Pass the key with which the model was \
         added to the state",
        near(near_key.as_deref())
    )]
    NoTensors {
        /// Key that was asked for.
        key: String,
        /// A key that differs by at most two letters.
        near_key: Option<String>,
        /// First components of the keys of all tensors.
        present: String,
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
    #[error(
        "the value `{key}` cannot be converted: {reason}. Save a value that serde can serialize, and read it as the type that \
         was saved"
    )]
    Value {
        /// Key of the value.
        key: String,
        /// Message of serde.
        reason: String,
    },
    /// Each rank has a value of its own, and there are more or fewer ranks than when they were
    /// saved.
    #[error(
        "`{key}` was saved with a value for each of {saved} ranks, and there are {ranks} ranks now. Leave it out, or use {saved} \
         ranks"
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
    #[error(
        "rank {rank} is the first rank of the mesh, whose values are loaded, but it passed `None`. Pass `Some` on that rank"
    )]
    NoValues {
        /// Global rank.
        rank: usize,
    },
    /// The saved tensors do not fit what is loaded. Everything that does not fit is listed.
    #[error("{}", describe_keys(*of, missing, unexpected, mismatched))]
    Keys {
        /// The load.
        of: LoadKind,
        /// Paths of the model that are not saved, each with its key if that is another.
        missing: Vec<String>,
        /// Saved keys that are not in the model.
        unexpected: Vec<String>,
        /// One text for each parameter of another shape or kind, with its path.
        mismatched: Vec<String>,
    },
}

impl CheckpointError {
    /// Returns the error, if it is one of checkpoints.
    pub(crate) fn of(error: &crate::Error) -> Option<Self> {
        match error {
            crate::Error::Checkpoint(error) => Some(error.clone()),
            _ => None,
        }
    }

    /// Creates the error of state that was saved for a parameter of dtype `saved`, which is `now`.
    pub(super) fn state_dtype(param: &str, saved: DType, now: DType) -> Self {
        Self::StateDType {
            param: param.into(),
            saved: saved.name().into(),
            dtype: now.name().into(),
        }
    }

    /// Creates the error of a load of a model under `key` from a checkpoint with `tensors`, none of
    /// which is below `key`.
    pub(super) fn no_tensors<'a>(key: &str, tensors: impl Iterator<Item = &'a String>) -> Self {
        let groups: Vec<String> = tensors
            .map(|tensor| tensor.split('.').next().unwrap_or_default().to_owned())
            .unique()
            .collect();
        let quoted = groups.iter().map(|group| format!("`{group}`"));
        let listed = quoted.take(LISTED).join(", ");
        let present = match groups.len() {
            0 => "no key".into(),
            len if len > LISTED => format!("{listed} and {} more", len - LISTED),
            _ => listed,
        };
        let pattern = PathPattern::parse(key).ok();
        let near_key = pattern.and_then(|pattern| pattern.nearest(&groups).cloned());
        Self::NoTensors {
            key: key.into(),
            near_key,
            present,
        }
    }

    /// Creates the error of global rank `rank`, which could not do `action` with the file or folder
    /// `path`.
    pub(super) fn io(rank: usize, action: &str, path: &Path, error: &io::Error) -> Self {
        Self::Io {
            rank,
            action: action.into(),
            path: path.into(),
            reason: error.to_string(),
        }
    }
}

/// A load that [`CheckpointError::Keys`] describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LoadKind {
    /// Parameters and buffers of a model, from a checkpoint or a state dict.
    Model,
    /// State of an optimizer.
    Optimizer,
    /// One tensor.
    Tensor,
    /// Weights in files of another framework.
    Weights,
}

fn near(key: Option<&str>) -> String {
    key.map_or_else(String::new, |key| format!(" (did you mean `{key}`?)"))
}

fn describe_newest(newest: Option<u64>) -> String {
    match newest {
        Some(step) => format!("the newest complete checkpoint is step {step}"),
        None => "there is no complete checkpoint".into(),
    }
}

/// Returns one sentence for each kind of keys that do not fit, and the remedies for them.
fn describe_keys(
    of: LoadKind,
    missing: &[String],
    unexpected: &[String],
    mismatched: &[String],
) -> String {
    let quoted = |paths: &[String]| paths.iter().map(|path| format!("`{path}`")).join(", ");
    let (subject, without) = match of {
        LoadKind::Model => ("what was saved does not fit the model", "Not saved"),
        LoadKind::Optimizer => (
            "the optimizer's state that was saved does not fit the model",
            "Without saved state",
        ),
        LoadKind::Tensor => ("the saved tensor does not fit the DTensor", "Not saved"),
        LoadKind::Weights => ("the files do not fit the model", "Not in the files"),
    };
    let parts = [
        (without, quoted(missing)),
        ("Not in the model", quoted(unexpected)),
        ("Of another shape or kind", mismatched.join("; ")),
    ];
    let parts = parts
        .iter()
        .filter(|(_, list)| !list.is_empty())
        .map(|(what, list)| format!("{what}: {list}"));
    let remedies = match of {
        LoadKind::Tensor => vec!["Pass a DTensor of the saved shape and kind"],
        LoadKind::Weights => {
            vec![
                "Return another `WeightSource` for these parameters, or `None` to leave them as they are",
            ]
        }
        LoadKind::Model | LoadKind::Optimizer => {
            let keys = "To load the rest, use `LoadOptions::with_partial`; to read a parameter from another key or to leave it \
                        out, `LoadOptions::with_renamed`";
            let shapes = "`LoadOptions::with_partial` allows no other shapes: build the model with those that were saved, or \
                          leave these parameters out by `LoadOptions::with_renamed`";
            let keys = (!missing.is_empty() || !unexpected.is_empty()).then_some(keys);
            keys.into_iter()
                .chain((!mismatched.is_empty()).then_some(shapes))
                .collect()
        }
    };
    [subject.to_owned()]
        .into_iter()
        .chain(parts)
        .chain(remedies.into_iter().map(str::to_owned))
        .join(". ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_under_which_nothing_was_saved_is_described_by_those_there_are() {
        let of = |key: &str, tensors: &[&str]| {
            let tensors: Vec<_> = tensors.iter().map(|tensor| (*tensor).to_owned()).collect();
            CheckpointError::no_tensors(key, tensors.iter()).to_string()
        };
        let tensors = [
            "model.head.bias",
            "model.head.weight",
            "optim.head.bias.exp_avg",
            "rows",
        ];
        assert_eq!(
            of("modle", &tensors),
            "the checkpoint has no tensors under `modle` (did you mean `model`?). It has tensors under `model`, `optim`, \
             `rows`. Pass the key with which the model was added to the state"
        );
        let other = of("teacher", &tensors);
        assert!(
            other.starts_with("the checkpoint has no tensors under `teacher`. It has"),
            "{other}"
        );
        assert!(of("model", &[]).contains("It has tensors under no key."));
        let many: Vec<_> = (0..20).map(|at| format!("m{at}.weight")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert!(of("model", &many).contains("`m15` and 4 more. Pass"));
    }
}
