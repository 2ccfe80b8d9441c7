//! [`CheckpointManager`]: the checkpoints of a training run, in one folder.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::agree::on_first;
use super::fs::{self, FileSystem, Links, MANIFEST};
use super::load::read_manifest;
use super::save::{Live, RunStep, SavePlan, write};
use super::{Checkpoint, CheckpointError, SaveReport, State};
use crate::Result;
use crate::mesh::DeviceMesh;

/// File with the name of the last complete checkpoint.
const LATEST: &str = "latest";

/// Checkpoints of a training run: folders `step-100`, `step-200` and so on, and a file `latest` with the name of the last.
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
    /// The step that is being written behind training, for this manager and its clones: identical on all ranks.
    in_flight: Arc<Mutex<Option<u64>>>,
}

/// Mark of the step that is being written behind training. It ends when it is dropped.
pub(super) struct InFlight(Arc<Mutex<Option<u64>>>);

impl Drop for InFlight {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

impl CheckpointManager {
    /// Creates a manager of the folder `path`, which is created when the first checkpoint is saved. Local: no
    /// communication.
    pub fn new(path: impl Into<PathBuf>, mesh: &DeviceMesh) -> Self {
        Self::new_in(fs::real(), path.into(), mesh)
    }

    pub(super) fn new_in(fs: Arc<dyn FileSystem>, path: PathBuf, mesh: &DeviceMesh) -> Self {
        Self { fs, path, mesh: mesh.clone(), keep: None, in_flight: Arc::default() }
    }

    /// Keeps only the last `keep` checkpoints, at least one. After each save, older ones are removed. Without it, all are
    /// kept.
    #[must_use]
    pub fn with_keep(self, keep: usize) -> Self {
        Self { keep: Some(keep.max(1)), ..self }
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Saves a checkpoint as `step-N`, makes it the latest, and then removes those that are not kept.
    ///
    /// # Collective
    /// Every rank of the state's mesh.
    ///
    /// # Errors
    /// Those of [`save`](super::save), [`CheckpointError::NoStep`], and [`CheckpointError::InFlight`] while an
    /// [`AsyncCheckpointer`](super::AsyncCheckpointer) of this manager or a clone writes. If `latest` cannot be moved or an
    /// old checkpoint cannot be removed, the new one is complete nevertheless.
    pub fn save(&self, state: &State) -> Result<SaveReport> {
        let plan = SavePlan::new(state)?;
        // All ranks have this step, or none.
        let step = state.step().ok_or(CheckpointError::NoStep)?;
        if let Some(in_flight) = *self.in_flight.lock() {
            return Err(CheckpointError::InFlight { path: self.path.clone(), step, in_flight }.into());
        }
        write(&*self.fs, &self.folder(step), plan, &mut Live::new(state), Some(&self.step(step)))
    }

    /// Marks a step as being written behind training.
    pub(super) fn start(&self, step: u64) -> InFlight {
        *self.in_flight.lock() = Some(step);
        InFlight(self.in_flight.clone())
    }

    /// Returns the folder of a step's checkpoint.
    pub(super) fn folder(&self, step: u64) -> PathBuf {
        self.path.join(name(step))
    }

    /// Returns what moves `latest` to the checkpoint of a step.
    pub(super) fn step(&self, step: u64) -> StepOfRun {
        StepOfRun { manager: self.clone(), step }
    }

    pub(super) fn fs(&self) -> &Arc<dyn FileSystem> {
        &self.fs
    }

    pub(super) fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Moves `latest` to a complete checkpoint, and removes those that are not kept.
    pub(super) fn commit(&self, fs: &dyn FileSystem, step: u64) -> Result<(), CheckpointError> {
        let latest = self.path.join(LATEST);
        fs::write_atomically(fs, &latest, name(step).as_bytes()).map_err(|error| self.io("write", &latest, error))?;
        let Some(keep) = self.keep else { return Ok(()) };
        let steps = complete(fs, &self.path).map_err(|error| self.io("read", &self.path, error))?;
        // The new one is kept, also if a run that was set back writes a lower step. Those after it are of the run before.
        let mut others: Vec<_> = steps.into_iter().filter(|&other| other != step).collect();
        others.sort_by_key(|&other| (other < step, other));
        others.truncate((others.len() + 1).saturating_sub(keep));
        for old in others {
            let old = self.path.join(name(old));
            fs::remove_dir_all(fs, &old).map_err(|error| self.io("remove", &old, error))?;
        }
        Ok(())
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
        on_first(&comm, "checkpoint_steps", || {
            complete(&*self.fs, &self.path).map_err(|error| self.io("read", &self.path, error))
        })
    }

    /// Opens the latest complete checkpoint; `None` if there is none.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`].
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        self.mesh.member("load a checkpoint on it")?;
        let comm = self.mesh.all()?;
        let found = on_first(&comm, "checkpoint_latest", || {
            let steps = complete(&*self.fs, &self.path).map_err(|error| self.io("read", &self.path, error))?;
            // The folder that `latest` names may have been removed by hand.
            let named = self.named(&*self.fs)?.filter(|step| steps.contains(step));
            let Some(named) = named else { return Ok(steps.last().copied()) };
            let manifest = |step| read_manifest(&*self.fs, &self.folder(step), self.mesh.rank());
            let Ok((_, checksum)) = manifest(named) else { return Ok(Some(named)) };
            // A save that was interrupted before it moved `latest` has completed the checkpoint after it.
            let follows =
                |step: &u64| manifest(*step).is_ok_and(|(manifest, _)| manifest.previous == Some((named, checksum)));
            Ok(Some(steps.into_iter().rev().filter(|step| *step != named).find(follows).unwrap_or(named)))
        })?;
        found.map(|step| Checkpoint::open_in(self.fs.clone(), &self.folder(step), &self.mesh)).transpose()
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
        let latest = self.path.join(LATEST);
        match fs::read_all(fs, &latest, Links::Refuse, 64) {
            Ok(bytes) => Ok(String::from_utf8(bytes).ok().and_then(|name| step_of(name.trim()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.io("read", &latest, error)),
        }
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
        let Some(named) = self.manager.named(fs)? else { return Ok(None) };
        let manifest = read_manifest(fs, &self.manager.folder(named), self.manager.mesh.rank());
        Ok(manifest.ok().map(|(_, checksum)| (named, checksum)))
    }

    fn commit(&self, fs: &dyn FileSystem) -> Result<(), CheckpointError> {
        self.manager.commit(fs, self.step)
    }
}

fn name(step: u64) -> String {
    format!("step-{step}")
}

fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// Returns the steps of the complete checkpoints in the folder, ascending.
fn complete(fs: &dyn FileSystem, path: &Path) -> io::Result<Vec<u64>> {
    let entries = match fs.list(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut steps = Vec::new();
    for entry in entries.iter().filter(|entry| entry.is_dir) {
        let Some(step) = step_of(&entry.name).filter(|step| name(*step) == entry.name) else { continue };
        let files = match fs.list(&path.join(&entry.name)) {
            // A save behind training, or of another program, has removed it by now.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            files => files?,
        };
        if files.iter().any(|file| file.name == MANIFEST) {
            steps.push(step);
        }
    }
    steps.sort_unstable();
    Ok(steps)
}
