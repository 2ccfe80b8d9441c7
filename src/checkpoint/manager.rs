//! [`CheckpointManager`]: the checkpoints of a training run, in one folder.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::fragments::LiveFragments;
use super::fs::{self, FileSystem, Links, MANIFEST};
use super::load::read_manifest;
use super::open_save::RunStep;
use super::save::write;
use super::save_plan::{SavePlan, rank_of_file};
use super::{Checkpoint, CheckpointError, SaveReport, State};
use crate::Result;
use crate::comm::{agree, agree_on_first};
use crate::mesh::DeviceMesh;

/// File with the name of the last complete checkpoint.
const LATEST: &str = "latest";

/// Checkpoints of a training run: folders `step-100`, `step-200` and so on, and a file `latest`
/// with the name of the last.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn_dtensor::prelude::*;
/// use burn_dtensor::checkpoint::{CheckpointManager, State};
///
/// # let folder = std::env::temp_dir().join(format!("checkpoint-manager-{}", std::process::id()));
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let model = fully_shard(LinearConfig::new(4, 3).init(world.device()), &mesh, FullyShard::new())?;
///     let run = CheckpointManager::new(&folder, &mesh).with_keep(2);
///     for step in [100, 200, 300] {
///         run.save(&State::new(&mesh).with_step(step).with_model("model", &model)?)?;
///     }
///     assert_eq!(run.steps()?, [200, 300]);
///     assert_eq!(run.latest()?.unwrap().step(), Some(300));
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct CheckpointManager {
    fs: Arc<dyn FileSystem>,
    path: PathBuf,
    mesh: DeviceMesh,
    keep: Option<usize>,
}

/// The steps that the ranks of this process write behind training.
static IN_FLIGHT: Mutex<Vec<(RunOfRank, u64)>> = Mutex::new(Vec::new());

/// A run's folder, by a path that is the same for all managers of the process, and a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RunOfRank {
    folder: PathBuf,
    rank: usize,
}

/// Mark of the step that a rank writes behind training. It ends when it is dropped.
pub(super) struct InFlight(RunOfRank);

impl Drop for InFlight {
    fn drop(&mut self) {
        IN_FLIGHT.lock().retain(|(run, _)| *run != self.0);
    }
}

impl CheckpointManager {
    /// Creates a manager of the folder `path`, which is created when the first checkpoint is saved.
    /// Local: no communication.
    pub fn new(path: impl Into<PathBuf>, mesh: &DeviceMesh) -> Self {
        Self::new_in(fs::real(), path.into(), mesh)
    }

    pub(super) fn new_in(fs: Arc<dyn FileSystem>, path: PathBuf, mesh: &DeviceMesh) -> Self {
        Self {
            fs,
            path,
            mesh: mesh.clone(),
            keep: None,
        }
    }

    /// Keeps only the last `keep` checkpoints, at least one. After each save, older ones are
    /// removed. Without it, all are kept.
    #[must_use]
    pub fn with_keep(self, keep: usize) -> Self {
        Self {
            keep: Some(keep.max(1)),
            ..self
        }
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Saves a checkpoint as `step-N`, makes it the latest, and then removes those that are not
    /// kept.
    ///
    /// If an old checkpoint cannot be removed, the new one is saved nevertheless, and
    /// [`SaveReport::not_removed`] says on all ranks what remains. The next save tries again. What
    /// was removed in part is no checkpoint any more.
    ///
    /// # Collective
    /// Every rank of the state's mesh.
    ///
    /// # Errors
    /// Those of [`save`](super::save), [`CheckpointError::NoStep`], and
    /// [`CheckpointError::InFlight`] while an [`AsyncCheckpointer`](super::AsyncCheckpointer) of a
    /// rank's process writes into the same folder. If `latest` cannot be moved, the checkpoint is
    /// complete nevertheless.
    pub fn save(&self, state: &State) -> Result<SaveReport> {
        let (plan, step) = self.plan(state)?;
        write(
            &*self.fs,
            &self.folder(step),
            plan,
            &mut LiveFragments::new(state),
            Some(&self.step(step)),
        )
    }

    /// Plans the save of a state. Also returns its step.
    ///
    /// # Collective
    /// Every rank of the state's mesh.
    ///
    /// # Errors
    /// Those of [`SavePlan::new`], [`CheckpointError::NoStep`] and [`CheckpointError::InFlight`],
    /// on all ranks.
    pub(super) fn plan(&self, state: &State) -> Result<(SavePlan, u64)> {
        let plan = SavePlan::new(state)?;
        // All ranks have this step, or none.
        let step = state.step().ok_or(CheckpointError::NoStep)?;
        let run = self.run_of_rank();
        let in_flight = IN_FLIGHT
            .lock()
            .iter()
            .find(|(other, _)| *other == run)
            .map(|(_, step)| *step);
        let own = match in_flight {
            Some(in_flight) => Err(CheckpointError::InFlight {
                path: self.path.clone(),
                step,
                in_flight,
            }),
            None => Ok(()),
        };
        // The save in flight may be of a mesh of other ranks.
        agree(&plan.comm, "checkpoint_in_flight", own)?;
        Ok((plan, step))
    }

    /// Marks a step as being written behind training. Its folder exists.
    pub(super) fn start(&self, step: u64) -> InFlight {
        let run = self.run_of_rank();
        IN_FLIGHT.lock().push((run.clone(), step));
        InFlight(run)
    }

    fn run_of_rank(&self) -> RunOfRank {
        RunOfRank {
            folder: self.fs.identity(&self.path),
            rank: self.mesh.rank(),
        }
    }

    /// Returns the folder of a step's checkpoint.
    pub(super) fn folder(&self, step: u64) -> PathBuf {
        self.path.join(name(step))
    }

    /// Returns what moves `latest` to the checkpoint of a step.
    pub(super) fn step(&self, step: u64) -> StepOfRun {
        StepOfRun {
            manager: self.clone(),
            step,
        }
    }

    pub(super) fn fs(&self) -> &Arc<dyn FileSystem> {
        &self.fs
    }

    pub(crate) fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Moves `latest` to a complete checkpoint, and removes those that are not kept. Returns an
    /// error for each that could not be removed.
    pub(super) fn commit(
        &self,
        fs: &dyn FileSystem,
        step: u64,
    ) -> Result<Vec<CheckpointError>, CheckpointError> {
        let latest = self.path.join(LATEST);
        fs::write_atomically(fs, &latest, name(step).as_bytes())
            .map_err(|error| self.io("write", &latest, error))?;
        Ok(self
            .keep
            .map(|keep| self.prune(fs, step, keep))
            .unwrap_or_default())
    }

    /// Removes the checkpoints that are not kept next to the one of `step`, and what earlier
    /// removals left.
    fn prune(&self, fs: &dyn FileSystem, step: u64, keep: usize) -> Vec<CheckpointError> {
        let folders = match folders(fs, &self.path) {
            Ok(folders) => folders,
            Err(error) => return vec![self.io("read", &self.path, error)],
        };
        let of = |kind: FolderState| {
            folders
                .iter()
                .filter(move |(_, state)| *state == kind)
                .map(|(step, _)| *step)
        };
        let removed = of(FolderState::Debris).chain(not_kept(
            of(FolderState::Complete).collect(),
            step,
            keep,
        ));
        let remove = |old: u64| {
            let old = self.folder(old);
            fs::remove_dir_all(fs, &old)
                .map_err(|error| self.io("remove", &old, error))
                .err()
        };
        removed.filter_map(remove).collect()
    }

    /// Returns the steps of the complete checkpoints, ascending.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] on all ranks.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let comm = self.mesh.all()?;
        agree_on_first(&comm, "checkpoint_steps", || {
            complete(&*self.fs, &self.path).map_err(|error| self.io("read", &self.path, error))
        })
    }

    /// Opens the latest complete checkpoint; `None` if there is none. It may be called while an
    /// [`AsyncCheckpointer`](super::AsyncCheckpointer) writes, which may remove that checkpoint
    /// once a later one is complete.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`].
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        self.mesh.member("load a checkpoint on it")?;
        let comm = self.mesh.all()?;
        let mut removed = None;
        loop {
            let found = agree_on_first(&comm, "checkpoint_latest", || {
                latest_step(&*self.fs, &self.path, self.mesh.rank())
            })?;
            let Some(step) = found else { return Ok(None) };
            match self.open(step) {
                // It was removed after it was found: there is a later one.
                Err(crate::Error::Checkpoint(CheckpointError::Incomplete { .. }))
                    if removed != Some(step) =>
                {
                    removed = Some(step);
                }
                opened => return opened.map(Some),
            }
        }
    }

    /// Opens the checkpoint of a step.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`].
    pub fn open(&self, step: u64) -> Result<Checkpoint> {
        Checkpoint::open_in(self.fs.clone(), &self.folder(step), &self.mesh)
    }

    /// Returns the step that `latest` names.
    pub(super) fn named(&self, fs: &dyn FileSystem) -> Result<Option<u64>, CheckpointError> {
        named(fs, &self.path, self.mesh.rank())
    }

    fn io(&self, action: &str, path: &Path, error: io::Error) -> CheckpointError {
        CheckpointError::io(self.mesh.rank(), action, path, &error)
    }
}

/// One step of a run.
pub(super) struct StepOfRun {
    manager: CheckpointManager,
    step: u64,
}

impl RunStep for StepOfRun {
    fn previous(&self, fs: &dyn FileSystem) -> Result<Option<(u64, u64)>, CheckpointError> {
        let Some(named) = self.manager.named(fs)? else {
            return Ok(None);
        };
        let manifest = read_manifest(fs, &self.manager.folder(named), self.manager.mesh.rank());
        Ok(manifest.ok().map(|(_, checksum)| (named, checksum)))
    }

    fn commit(&self, fs: &dyn FileSystem) -> Result<Vec<CheckpointError>, CheckpointError> {
        self.manager.commit(fs, self.step)
    }
}

fn name(step: u64) -> String {
    format!("step-{step}")
}

fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// Returns the folder of the latest complete checkpoint of the run in the folder `path`, which a
/// [`CheckpointManager`] saved; `None` if there is none.
///
/// Needs no launch.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn latest(path: impl AsRef<Path>) -> Result<Option<PathBuf>, CheckpointError> {
    let path = path.as_ref();
    Ok(latest_step(&*fs::real(), path, 0)?.map(|step| path.join(name(step))))
}

fn latest_step(
    fs: &dyn FileSystem,
    path: &Path,
    rank: usize,
) -> Result<Option<u64>, CheckpointError> {
    let steps =
        complete(fs, path).map_err(|error| CheckpointError::io(rank, "read", path, &error))?;
    let manifest = |step| read_manifest(fs, &path.join(name(step)), rank);
    // The folder that `latest` names may have been removed by hand, or be a link to where it was
    // moved.
    let Some(named) =
        named(fs, path, rank)?.filter(|step| steps.contains(step) || manifest(*step).is_ok())
    else {
        return Ok(steps.last().copied());
    };
    let Ok((_, checksum)) = manifest(named) else {
        return Ok(Some(named));
    };
    // A save that was interrupted before it moved `latest` has completed the checkpoint after it.
    Ok(Some(
        steps
            .into_iter()
            .rev()
            .filter(|step| *step != named)
            .find(|step| {
                manifest(*step)
                    .is_ok_and(|(manifest, _)| manifest.previous == Some((named, checksum)))
            })
            .unwrap_or(named),
    ))
}

/// Returns the step that `latest` names.
fn named(fs: &dyn FileSystem, path: &Path, rank: usize) -> Result<Option<u64>, CheckpointError> {
    let latest = path.join(LATEST);
    match fs::read_all(fs, &latest, Links::Refuse, 64) {
        Ok(bytes) => Ok(String::from_utf8(bytes)
            .ok()
            .and_then(|name| step_of(name.trim()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CheckpointError::io(rank, "read", &latest, &error)),
    }
}

/// State of a folder `step-N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FolderState {
    /// A complete checkpoint.
    Complete,
    /// The files of a checkpoint that was removed in part, or nothing.
    Debris,
    /// A checkpoint that is being saved, or files of others.
    Other,
}

/// Returns the steps that have a folder, ascending, and what is in it.
fn folders(fs: &dyn FileSystem, path: &Path) -> io::Result<Vec<(u64, FolderState)>> {
    let entries = match fs.list(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut folders = Vec::new();
    for entry in entries.iter().filter(|entry| entry.is_dir) {
        let Some(step) = step_of(&entry.name).filter(|step| name(*step) == entry.name) else {
            continue;
        };
        let files = match fs.list(&path.join(&entry.name)) {
            // A save behind training, or of another program, has removed it by now.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            files => files?,
        };
        // A save has a probe until the manifest is there, and a removal begins with the manifest.
        let state = match files.iter().any(|file| file.name == MANIFEST) {
            true => FolderState::Complete,
            false
                if files
                    .iter()
                    .all(|file| !file.is_dir && rank_of_file(&file.name).is_some()) =>
            {
                FolderState::Debris
            }
            false => FolderState::Other,
        };
        folders.push((step, state));
    }
    folders.sort_unstable_by_key(|(step, _)| *step);
    Ok(folders)
}

/// Returns the steps of the complete checkpoints in the folder, ascending.
fn complete(fs: &dyn FileSystem, path: &Path) -> io::Result<Vec<u64>> {
    let folders = folders(fs, path)?.into_iter();
    Ok(folders
        .filter(|(_, state)| *state == FolderState::Complete)
        .map(|(step, _)| step)
        .collect())
}

/// Returns which of the checkpoints of `steps` are removed, in that order, if `keep` are kept and
/// the one of `saved` is the last.
///
/// The checkpoint of `saved` is kept, also if a run that was set back has saved a lower step. Steps
/// after it are of the run before, and are removed first.
fn not_kept(steps: Vec<u64>, saved: u64, keep: usize) -> Vec<u64> {
    let mut others: Vec<_> = steps.into_iter().filter(|&step| step != saved).collect();
    others.sort_unstable_by_key(|&step| (step < saved, step));
    others.truncate((others.len() + 1).saturating_sub(keep));
    others
}

#[cfg(test)]
mod tests {
    use super::not_kept;

    #[test]
    fn old_checkpoints_are_removed_and_those_of_a_run_before_it_was_set_back_first() {
        for (steps, saved, keep, expected) in [
            (&[10, 9, 8, 11][..], 11, 4, &[][..]),
            (&[10, 9, 8, 11], 11, 2, &[8, 9]),
            (&[10, 9, 8, 11], 11, 1, &[8, 9, 10]),
            (&[1, 2, 3, 4, 5], 3, 4, &[4]),
            (&[1, 2, 3, 4, 5], 3, 3, &[4, 5]),
            (&[1, 2, 3, 4, 5], 3, 2, &[4, 5, 1]),
            (&[1, 2, 3, 4, 5], 3, 1, &[4, 5, 1, 2]),
            (&[7], 7, 1, &[]),
            // Removed by another program since.
            (&[5, 6], 7, 2, &[5]),
            (&[], 7, 1, &[]),
        ] {
            assert_eq!(
                not_kept(steps.to_vec(), saved, keep),
                expected,
                "{steps:?} {saved} {keep}"
            );
        }
    }
}
