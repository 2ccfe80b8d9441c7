//! Checkpoints: a distributed model, its optimizer and other state in files, written by all ranks
//! and loaded on any mesh.
//!
//! | | |
//! |---|---|
//! | save | [`State`] collects what is saved; [`save`](save()) writes it into a folder, [`CheckpointManager`] into the folders of a run, [`AsyncCheckpointer`] behind training |
//! | load | [`Checkpoint`] reads shards of models, optimizers, tensors and values, with [`LoadOptions`]; [`SafetensorsWeights`] those of models in files of other frameworks |
//! | in memory | [`StateDict`]: a model's tensors by path |
//! | tools | [`inspect`](inspect()), [`verify`](verify()), [`consolidate`](consolidate()), [`latest`], [`set_back`], [`Checkpoint::reshard`] |
//!
//! A save writes the ranks' files and then the manifest into a folder of its own, and renames the
//! folder to the checkpoint's name, each durable before the next; only then are old checkpoints
//! removed, which get another name first. A load maps the target shards to byte ranges of the
//! files, and each rank reads its own. All loads of a model match its parameters with what is saved
//! by the same rules, and list everything that does not fit in one error,
//! [`CheckpointError::Keys`]. An error is the same on all ranks.

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
