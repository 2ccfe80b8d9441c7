//! [`Checker`]: what a loss of power must leave of a run.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::states::{RUN, is_saved, manager, state};
use crate::checkpoint::fs::recorder::{Crash, Recorder};
use crate::checkpoint::fs::{Entry, FileSystem};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::mesh::DeviceMesh;
use crate::prelude::*;

/// The folder of a checkpoint next to those of the run.
pub(super) const EXPORT: &str = "/run/best";

/// The contents that a run folder must and may have.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Expected {
    /// Steps whose saves have returned and that were not removed, ascending.
    pub saved: Vec<u64>,
    /// The steps of which one is the latest; `None` if there may be none.
    pub latest: BTreeSet<Option<u64>>,
    /// True if the latest may be refused, because a file `latest` names another.
    pub may_differ: bool,
    /// The step of the checkpoint in [`EXPORT`], if its save has returned.
    pub exported: Option<u64>,
}

impl Expected {
    pub fn empty() -> Self {
        Self::new(Vec::new(), [None])
    }

    pub fn new<const N: usize>(saved: Vec<u64>, latest: [Option<u64>; N]) -> Self {
        Self {
            saved,
            latest: latest.into(),
            may_differ: false,
            exported: None,
        }
    }

    pub fn last(&self) -> u64 {
        self.saved.last().copied().unwrap_or_default()
    }
}

/// Checks what a crash leaves. Checks of the same contents are not repeated, nor are loads of the
/// same checkpoint.
pub(super) struct Checker<'a> {
    mesh: &'a DeviceMesh,
    /// Number of ranks that saved.
    ranks: u64,
    checked: HashSet<(u64, Expected)>,
    loads: HashMap<(u64, u64), Result<(), String>>,
    saved_again: HashSet<(u64, u64)>,
    tried: usize,
    distinct: usize,
}

impl<'a> Checker<'a> {
    fn new(mesh: &'a DeviceMesh, ranks: u64) -> Self {
        let checked = HashSet::new();
        let loads = HashMap::new();
        let saved_again = HashSet::new();
        Self {
            mesh,
            ranks,
            checked,
            loads,
            saved_again,
            tried: 0,
            distinct: 0,
        }
    }

    /// Checks all crashes after that many marks, and that a step can be saved again after each.
    pub fn check_crashes(
        &mut self,
        fs: &Recorder,
        marks: usize,
        step: u64,
        expected: impl Fn(&Crash) -> Expected,
    ) -> Result<(), String> {
        let mut crashes = fs.crashes().after_marks(marks);
        let checked = crashes.by_ref().try_for_each(|crash| {
            self.distinct += 1;
            let left = format!("{:?}", crash.left);
            self.check(&crash.left, expected(&crash))
                .and_then(|()| self.save_again(&crash.left, step))
                .map_err(|fault| format!("{fault}\n  {}\n  left: {left}", crash.description))
        });
        self.tried += crashes.tried();
        checked
    }

    /// Describes how much was checked.
    pub fn report(&self) -> String {
        format!(
            "{} crashes, {} different file systems, {} different checkpoints loaded, {} replaced",
            self.tried,
            self.distinct,
            self.loads.len(),
            self.saved_again.len()
        )
    }

    fn check(&mut self, left: &Recorder, expected: Expected) -> Result<(), String> {
        let of_all = left.digest(Path::new("/")).expect("there is a root");
        if self.checked.contains(&(of_all, expected.clone())) {
            return Ok(());
        }
        let run = manager(left, self.mesh);
        let steps = run
            .steps()
            .map_err(|error| format!("the run folder: {error}"))?;
        for &step in &steps {
            self.load(left, &folder(step), step)
                .map_err(|fault| format!("step {step} does not load: {fault}"))?;
        }
        if let Some(lost) = expected.saved.iter().find(|step| !steps.contains(step)) {
            return Err(format!(
                "step {lost} is lost, of which the save had returned"
            ));
        }
        if let Some(step) = expected.exported {
            self.load(left, Path::new(EXPORT), step)
                .map_err(|fault| format!("the export does not load: {fault}"))?;
        }
        match run.latest() {
            Err(crate::Error::Checkpoint(CheckpointError::LatestFile { .. }))
                if expected.may_differ => {}
            Err(error) => return Err(format!("the latest: {error}")),
            Ok(latest) => {
                let latest = latest.and_then(|latest| latest.step());
                if !expected.latest.contains(&latest) {
                    return Err(format!(
                        "the latest is {latest:?}, where {expected:?} and there are {steps:?}"
                    ));
                }
            }
        }
        self.checked.insert((of_all, expected));
        Ok(())
    }

    fn load(&mut self, left: &Recorder, folder: &Path, step: u64) -> Result<(), String> {
        let digest = left.digest(folder).ok_or("there is no folder")?;
        let mesh = self.mesh;
        let ranks = self.ranks;
        let load = || {
            let opened = Checkpoint::open_in(Arc::new(left.clone()), folder, mesh);
            is_saved(
                &opened.map_err(|error| error.to_string())?,
                mesh,
                ranks,
                step,
            )
        };
        self.loads
            .entry((digest, step))
            .or_insert_with(load)
            .clone()
    }

    /// Saves a step where an interrupted save or removal left something, unless the same was left
    /// before. Nothing of it remains then.
    fn save_again(&mut self, left: &Recorder, step: u64) -> Result<(), String> {
        // Of the run: the rest of an export is removed by the next one.
        let is_debris = |entry: &Entry| {
            entry.name.starts_with("step-")
                && (entry.name.contains(".saving-") || entry.name.contains(".removing-"))
        };
        let has_debris = || {
            left.list(Path::new(RUN))
                .unwrap_or_default()
                .iter()
                .any(is_debris)
        };
        let digest = left.digest(Path::new("/")).expect("there is a root");
        if !has_debris() || !self.saved_again.insert((digest, step)) {
            return Ok(());
        }
        let run = manager(left, self.mesh);
        match state(self.mesh, step, 0).and_then(|state| run.save(&state)) {
            Err(crate::Error::Checkpoint(
                CheckpointError::Exists { .. }
                | CheckpointError::LaterStep { .. }
                | CheckpointError::LatestFile { .. },
            )) => return Ok(()),
            saved => saved.map_err(|error| format!("step {step} is not saved again: {error}"))?,
        };
        if has_debris() {
            return Err(format!("something is left: {left:?}"));
        }
        let left = left.lose_pending();
        let latest = manager(&left, self.mesh)
            .latest()
            .map_err(|error| error.to_string())?;
        let latest = latest.ok_or("there is no latest after another save")?;
        is_saved(&latest, self.mesh, 1, step)
    }
}

/// Returns the folder of a step's checkpoint.
pub(super) fn folder(step: u64) -> PathBuf {
    Path::new(RUN).join(format!("step-{step}"))
}

/// Runs a check on one rank.
pub(super) fn on_one_rank<T: Send>(
    ranks_that_saved: u64,
    check: impl Fn(&mut Checker<'_>) -> T + Sync,
) -> T {
    let checked = launch(Launch::threads(1), |world| {
        let mesh = DeviceMesh::new(world, [1], ["shard"])?;
        Ok(check(&mut Checker::new(&mesh, ranks_that_saved)))
    });
    checked.unwrap().pop().expect("there is one rank").1
}
