//! [`save`]: writes a checkpoint from all ranks.

use std::path::Path;

#[cfg(doc)]
use super::CheckpointError;
use super::State;
use super::fragments::{FragmentBytes, LiveFragments};
use super::fs::{self, FileSystem};
use super::open_save::{OpenSave, RunStep};
use super::save_plan::SavePlan;
use super::save_report::SaveReport;
use crate::Result;
use crate::comm::agree_on_first;

/// Writes a checkpoint into the folder `path`, which must not exist.
///
/// Each rank writes its own shards into a file of its own. What several ranks hold is written once,
/// and the work is divided evenly among them. The files are written into a folder next to it,
/// `NAME.saving-..`, which gets its name once all of them are on disk: a folder of that name is a
/// complete checkpoint, also after a power loss. What interrupted saves left is removed.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn_dtensor::prelude::*;
/// use burn_dtensor::checkpoint::{self, Checkpoint, LoadOptions, State};
///
/// # let folder = std::env::temp_dir().join(format!("checkpoint-save-{}", std::process::id()));
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let model = fully_shard(LinearConfig::new(4, 3).init(world.device()), &mesh, FullyShard::new())?;
///     let state = State::new(&mesh).with_model("model", &model)?.with_value("epoch", &3)?;
///     checkpoint::save(&folder, &state)?;
///
///     // Any mesh may load it.
///     let mesh = DeviceMesh::new(world, [2, 1], ["replicate", "shard"])?;
///     let again = fully_shard(LinearConfig::new(4, 3).init(world.device()), &mesh, FullyShard::new())?;
///     let checkpoint = Checkpoint::open(&folder, &mesh)?;
///     let (again, _) = checkpoint.load_model("model", again, &LoadOptions::new())?;
///     assert_eq!(again.weight.val().into_data(), model.weight.val().into_data());
///     assert_eq!(checkpoint.value::<i32>("epoch")?, 3);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// # Collective
/// Every rank of the state's mesh, with states of the same keys. A rank waits for the others'
/// writes at most for the launch's deadline.
///
/// # Errors
/// On all ranks, and an existing complete checkpoint is never changed: [`CheckpointError::Exists`],
/// [`CheckpointError::Occupied`], [`CheckpointError::NotShared`], [`CheckpointError::Partial`],
/// [`CheckpointError::DType`], [`CheckpointError::Name`], [`CheckpointError::Disagree`],
/// [`CheckpointError::Cover`], [`CheckpointError::Overlap`], and [`CheckpointError::Io`], for
/// instance for a full disk. [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn save(path: impl AsRef<Path>, state: &State) -> Result<SaveReport> {
    let plan = SavePlan::new(state)?;
    write(
        &*fs::real(),
        path.as_ref(),
        plan,
        &mut LiveFragments::new(state),
        None,
    )
}

/// Writes the files of all ranks and the manifest, and gives the checkpoint its name. If it belongs
/// to a run, it must be the newest.
///
/// # Collective
/// Every rank of the plan's group.
pub(super) fn write(
    fs: &dyn FileSystem,
    path: &Path,
    plan: SavePlan,
    bytes: &mut dyn FragmentBytes,
    run: Option<&dyn RunStep>,
) -> Result<SaveReport> {
    let save = OpenSave::begin(fs, path, plan, run)?;
    let written = save.gather(fs, save.write_fragments(fs, bytes))?;
    agree_on_first(save.comm(), "checkpoint_commit", || {
        save.commit(fs, written, run)
    })
    .map(|done| save.report(done))
}
