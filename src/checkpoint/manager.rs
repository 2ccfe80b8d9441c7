//! [`CheckpointManager`]: the checkpoints of a training run, in one folder.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::best::{Best, BestBy};
use super::claim::{ABANDONED_AFTER, Liveness};
use super::fragments::LiveFragments;
use super::fs::{self, FileSystem};
use super::open_save::RunStep;
use super::run_folder::{self, RunFolder, check_latest, name, remove_all, remove_latest};
use super::save::write;
use super::save_plan::SavePlan;
use super::{Checkpoint, CheckpointError, SaveReport, State};
use crate::Result;
use crate::comm::{agree, agree_on_first};
use crate::mesh::DeviceMesh;

/// Checkpoints of a training run: folders `step-100`, `step-200` and so on. The latest is the newest
/// that is complete.
///
/// A save writes into a folder `step-N.saving-..`, which gets the name `step-N` once all is there.
/// So several jobs may have one folder, such as a job that is started again while the one before
/// still dies: of two that save the same step one succeeds, and the other one's error is
/// [`CheckpointError::Exists`]. What killed processes have left is removed by later saves.
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
    best: Option<BestBy>,
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
            path: absolute(&path),
            mesh: mesh.clone(),
            keep: None,
            best: None,
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

    /// Keeps the best checkpoint, too: that with the lowest or highest value `key`, an `f64` that each
    /// save adds with [`State::with_value`]. Of equal ones it is the first. Without
    /// [`with_keep`](Self::with_keep), all are kept.
    ///
    /// ```
    /// # use burn_dtensor::prelude::*;
    /// use burn_dtensor::checkpoint::{Best, CheckpointManager, State};
    ///
    /// # let folder = std::env::temp_dir().join(format!("checkpoint-best-{}", std::process::id()));
    /// # launch(Launch::threads(2), |world| {
    /// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
    /// let run = CheckpointManager::new(&folder, &mesh).with_keep(1).with_best("loss", Best::Lowest);
    /// for (step, loss) in [(10, 0.5), (20, 0.3), (30, 0.4)] {
    ///     run.save(&State::new(&mesh).with_step(step).with_value("loss", &loss)?)?;
    /// }
    /// assert_eq!(run.steps()?, [20, 30]);
    /// assert_eq!(run.best("loss", Best::Lowest)?.unwrap().step(), Some(20));
    /// # Ok(())
    /// # })?;
    /// # std::fs::remove_dir_all(folder)?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    #[must_use]
    pub fn with_best(self, key: impl Into<String>, best: Best) -> Self {
        let key = key.into();
        Self {
            best: Some(BestBy { key, best }),
            ..self
        }
    }

    /// Returns the key of the value by which the best is kept, and which is the best.
    #[cfg(feature = "train")]
    pub(crate) fn best_by(&self) -> Option<(String, Best)> {
        let BestBy { key, best } = self.best.clone()?;
        Some((key, best))
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Saves a checkpoint as `step-N`, and then removes those that are not kept, and what killed
    /// processes have left of saves of this step and lower ones. The step must be the highest of the
    /// run.
    ///
    /// If an old checkpoint cannot be removed, the new one is saved nevertheless, and
    /// [`SaveReport::not_removed`] says on all ranks what remains. The next save tries again. What
    /// was removed in part is no checkpoint any more.
    ///
    /// # Collective
    /// Every rank of the state's mesh.
    ///
    /// # Errors
    /// Those of [`save`](super::save), [`CheckpointError::NoStep`], [`CheckpointError::LaterStep`],
    /// [`CheckpointError::NoValue`] and [`CheckpointError::Value`] if the state has no `f64` by which
    /// the [best](Self::with_best) is kept,
    /// [`CheckpointError::LatestFile`], and [`CheckpointError::InFlight`] while an
    /// [`AsyncCheckpointer`](super::AsyncCheckpointer) of a rank's process writes into the same
    /// folder.
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
        // All ranks have these values and this step, or none.
        if let Some(by) = &self.best {
            by.check(state)?;
        }
        let step = state.step().ok_or(CheckpointError::NoStep)?;
        // The save in flight may be of a mesh of other ranks.
        agree(
            &plan.comm,
            "checkpoint_in_flight",
            self.check_in_flight(step),
        )?;
        Ok((plan, step))
    }

    /// Checks that this rank writes no step behind training.
    fn check_in_flight(&self, step: u64) -> Result<(), CheckpointError> {
        // Without one, the folder is not looked for: on a network file system a rank that has looked
        // for a folder in vain does not see it for some time.
        if IN_FLIGHT.lock().is_empty() {
            return Ok(());
        }
        let run = self.run_of_rank();
        let in_flight = IN_FLIGHT
            .lock()
            .iter()
            .find(|(other, _)| *other == run)
            .map(|(_, step)| *step);
        match in_flight {
            Some(in_flight) => Err(CheckpointError::InFlight {
                path: self.path.clone(),
                step,
                in_flight,
            }),
            None => Ok(()),
        }
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

    /// Returns what a save of a step asks of its run.
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

    /// Removes the checkpoints that are not kept, and what killed processes have left of saves and
    /// removals. Returns an error for each that remains.
    pub(super) fn tidy(&self, fs: &dyn FileSystem, saved: u64) -> Vec<CheckpointError> {
        let run = match RunFolder::read(fs, &self.path) {
            Ok(run) => run,
            Err(error) => return vec![self.io("read", &self.path, error)],
        };
        let mut errors = Vec::new();
        let mut removed: Vec<_> = run
            .removing
            .iter()
            .map(|name| self.path.join(name))
            .collect();
        match self.not_kept(fs, &run.complete) {
            Ok(steps) => removed.extend(steps.into_iter().map(|step| self.folder(step))),
            Err(error) => errors.push(error),
        }
        let is_over = |step: &&u64| **step < saved;
        removed.extend(
            run.interrupted
                .iter()
                .filter(is_over)
                .map(|step| self.folder(*step)),
        );
        for (name, step, claim) in &run.saving {
            let path = self.path.join(name);
            match claim.liveness() {
                Liveness::Ended => removed.push(path),
                Liveness::Unknown if *step <= saved => errors.push(CheckpointError::MaybeLive {
                    path,
                    process: claim.process(),
                    hours: ABANDONED_AFTER.as_secs() / 3600,
                }),
                Liveness::Unknown | Liveness::Live => {}
            }
        }
        for (folder, error) in remove_all(fs, removed) {
            errors.push(self.io("remove", &folder, error));
        }
        errors
    }

    /// Returns those of the complete steps, ascending, whose checkpoints are not kept.
    fn not_kept(&self, fs: &dyn FileSystem, complete: &[u64]) -> Result<Vec<u64>, CheckpointError> {
        let Some(keep) = self.keep.filter(|keep| *keep < complete.len()) else {
            return Ok(Vec::new());
        };
        let best = match &self.best {
            Some(by) => by.find(fs, &self.path, complete, self.mesh.rank())?,
            None => None,
        };
        let older = complete[..complete.len() - keep].iter().copied();
        Ok(older.filter(|step| Some(*step) != best).collect())
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
            let run = RunFolder::read(&*self.fs, &self.path);
            let run = run.map_err(|error| self.io("read", &self.path, error))?;
            Ok::<_, CheckpointError>(run.complete)
        })
    }

    /// Opens the latest complete checkpoint, that of the newest step; `None` if there is none. The
    /// run may continue meanwhile, also in another program: a checkpoint that it removes can still be
    /// loaded by the program that has opened it, if it has at most 64 files and the file system keeps files that
    /// are open.
    ///
    /// To go back to an older step, [set the run back](Self::set_back).
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`], and [`CheckpointError::LatestFile`].
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        self.open_found("checkpoint_latest", || {
            latest_step(&*self.fs, &self.path, self.mesh.rank())
        })
    }

    /// Opens the best checkpoint, that with the lowest or highest value `key`, which must be an
    /// `f64`; the first of those that are equal. `None` if no checkpoint has such a value. Otherwise
    /// like [`latest`](Self::latest).
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`].
    pub fn best(&self, key: &str, best: Best) -> Result<Option<Checkpoint>> {
        let key = key.to_owned();
        let by = BestBy { key, best };
        self.open_found("checkpoint_best", || {
            let (path, rank) = (&self.path, self.mesh.rank());
            let run =
                RunFolder::read(&*self.fs, path).map_err(|error| self.io("read", path, error))?;
            by.find(&*self.fs, path, &run.complete, rank)
        })
    }

    /// Opens the checkpoint of the step that the first rank finds.
    fn open_found(
        &self,
        call: &'static str,
        find: impl Fn() -> Result<Option<u64>, CheckpointError>,
    ) -> Result<Option<Checkpoint>> {
        self.mesh.member("load a checkpoint on it")?;
        let comm = self.mesh.all()?;
        let mut removed = None;
        loop {
            let found = agree_on_first(&comm, call, &find)?;
            let Some(step) = found else { return Ok(None) };
            match self.open(step).and_then(Checkpoint::hold_files) {
                // It was removed after it was found: there is another one.
                Err(crate::Error::Checkpoint(CheckpointError::Incomplete { .. }))
                    if removed != Some(step) =>
                {
                    removed = Some(step);
                }
                opened => return opened.map(Some),
            }
        }
    }

    /// Sets the run back to `step`, so that its checkpoint is the latest and later steps can be
    /// saved again. Returns the folders in which the later checkpoints are now, the newest first:
    /// `step-30` becomes `step-30.set-aside`. Nothing removes them.
    ///
    /// If it is interrupted, call it again.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::Incomplete`] if the step has no complete checkpoint,
    /// [`CheckpointError::InFlight`], and [`CheckpointError::Io`].
    pub fn set_back(&self, step: u64) -> Result<Vec<PathBuf>> {
        self.mesh.member("set a run back on it")?;
        let comm = self.mesh.all()?;
        agree(&comm, "checkpoint_in_flight", self.check_in_flight(step))?;
        let folders = agree_on_first(&comm, "checkpoint_set_back", || {
            let folders = run_folder::set_back(&*self.fs, &self.path, step, self.mesh.rank())?;
            let folders = folders.into_iter().map(PathBuf::into_os_string);
            Ok::<Vec<_>, CheckpointError>(folders.collect())
        })?;
        Ok(folders.into_iter().map(PathBuf::from).collect())
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
    fn check(&self, fs: &dyn FileSystem) -> Result<(), CheckpointError> {
        let CheckpointManager { path, mesh, .. } = &self.manager;
        let run =
            RunFolder::read(fs, path).map_err(|error| self.manager.io("read", path, error))?;
        check_latest(fs, path, run.newest(), mesh.rank())?;
        match run.newest().filter(|newest| *newest > self.step) {
            Some(later) => Err(CheckpointError::LaterStep {
                path: path.clone(),
                step: self.step,
                later,
            }),
            None => Ok(()),
        }
    }

    fn before_commit(&self, fs: &dyn FileSystem) -> Result<(), CheckpointError> {
        self.check(fs)?;
        let path = &self.manager.path;
        remove_latest(fs, path).map_err(|error| self.manager.io("remove", path, error))
    }

    fn after_commit(&self, fs: &dyn FileSystem) -> Vec<CheckpointError> {
        self.manager.tidy(fs, self.step)
    }
}

/// Returns the folder of the latest complete checkpoint of the run in the folder `path`, which a
/// [`CheckpointManager`] saved: that of the newest step; `None` if there is none.
///
/// Local: needs no launch.
///
/// # Errors
/// [`CheckpointError::LatestFile`] and [`CheckpointError::Io`].
pub fn latest(path: impl AsRef<Path>) -> Result<Option<PathBuf>, CheckpointError> {
    let path = path.as_ref();
    let step = latest_step(&*fs::real(), &absolute(path), 0)?;
    Ok(step.map(|step| path.join(name(step))))
}

/// Sets the run in the folder `path` back to `step`, as [`CheckpointManager::set_back`] does, and
/// returns the folders in which later checkpoints are now, the newest first.
///
/// Local: needs no launch. Call it once, and let no program save into the folder meanwhile.
///
/// # Errors
/// [`CheckpointError::Incomplete`] if the step has no complete checkpoint, and
/// [`CheckpointError::Io`].
pub fn set_back(path: impl AsRef<Path>, step: u64) -> Result<Vec<PathBuf>, CheckpointError> {
    run_folder::set_back(&*fs::real(), &absolute(path.as_ref()), step, 0)
}

fn latest_step(
    fs: &dyn FileSystem,
    path: &Path,
    rank: usize,
) -> Result<Option<u64>, CheckpointError> {
    let run = RunFolder::read(fs, path)
        .map_err(|error| CheckpointError::io(rank, "read", path, &error))?;
    let newest = run.newest();
    check_latest(fs, path, newest, rank)?;
    if !run.exists {
        warn_once(path);
    }
    let after = |step: &u64| newest.is_none_or(|newest| *step > newest);
    if let Some(passed) = run.interrupted.into_iter().rev().find(after) {
        let taken = match newest {
            Some(newest) => format!("{} is the latest checkpoint", name(newest)),
            None => "there is no complete checkpoint".into(),
        };
        log::warn!(
            "{} has no manifest.json, as a save that was interrupted leaves it, and is passed over: {taken}",
            path.join(name(passed)).display()
        );
    }
    Ok(newest)
}

/// Returns the path from the root: the program may change its folder while a save is written. An
/// empty path is the current folder.
fn absolute(path: &Path) -> PathBuf {
    let path = match path.as_os_str().is_empty() {
        true => Path::new("."),
        false => path,
    };
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Warns that the folder of a run does not exist, the first time that this process looks for it.
fn warn_once(path: &Path) {
    static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    if WARNED.lock().insert(path.to_owned()) {
        log::warn!(
            "there is no folder {}, so the run has no checkpoint to continue from, and begins from scratch",
            path.display()
        );
    }
}
