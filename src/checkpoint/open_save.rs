//! [`OpenSave`]: a save in progress, from the creation of its folder to its final name.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::CheckpointError;
use super::claim::{Claim, HeldClaim};
use super::fragments::{FragmentBytes, write_fragments};
use super::fs::{self, FileSystem, Links, MANIFEST, check_no_link, parent};
use super::run_folder::{abandoned, foreign, remove_all, saving};
use super::save_plan::{SavePlan, WrittenFile};
use super::save_report::SaveReport;
use crate::Result;
use crate::comm::{Communicator, agree, agree_on_first};

/// Run to which a checkpoint belongs.
pub(super) trait RunStep: Send + Sync {
    /// Checks that the checkpoint will be the newest of the run.
    fn check(&self, fs: &dyn FileSystem) -> Result<(), CheckpointError>;
    /// Called before the checkpoint gets its name.
    fn before_commit(&self, fs: &dyn FileSystem) -> Result<(), CheckpointError>;
    /// Called once the checkpoint is complete. Removes old ones, and returns an error for each that
    /// remains.
    fn after_commit(&self, fs: &dyn FileSystem) -> Vec<CheckpointError>;
}

/// A save whose folder exists. Its steps are to be called in the order of its methods.
pub(super) struct OpenSave {
    /// Folder of the checkpoint, once it is complete.
    path: PathBuf,
    /// Folder into which it is written.
    folder: PathBuf,
    plan: SavePlan,
    _claim: HeldClaim,
}

impl OpenSave {
    /// Creates the folder into which the checkpoint `path` is written.
    ///
    /// # Collective
    /// Every rank of the plan's group.
    pub fn begin(
        fs: &dyn FileSystem,
        path: &Path,
        plan: SavePlan,
        run: Option<&dyn RunStep>,
    ) -> Result<Self> {
        let group = plan.comm.group().clone();
        let first = group.ranks()[0];
        let rank = group.ranks()[group.rank()];
        let mut held = None;
        let claim = agree_on_first(&plan.comm, "checkpoint_folder", || {
            let claim = Claim::new();
            // Held from before the folder exists.
            held = Some(claim.hold());
            create(fs, path, claim, rank, run)?;
            Ok::<_, CheckpointError>(claim.to_string())
        })?;
        let claim = Claim::parse(&claim).expect("the first rank has written it");
        let folder = saving(path, claim);
        let save = Self {
            path: path.into(),
            folder,
            plan,
            _claim: held.unwrap_or_else(|| claim.hold()),
        };
        let seen = match fs.is_dir(&save.folder, Links::Refuse) {
            Ok(true) => Ok(()),
            Ok(false) if rank == first => Err(save.replaced()),
            Ok(false) => Err(CheckpointError::NotShared {
                path: path.into(),
                rank,
                of: first,
            }),
            Err(error) => Err(CheckpointError::io(rank, "open", &save.folder, &error)),
        };
        agree(save.comm(), "checkpoint_probe", seen).inspect_err(|_| save.discard(fs))?;
        Ok(save)
    }

    pub fn plan(&self) -> &SavePlan {
        &self.plan
    }

    pub fn comm(&self) -> &Communicator {
        &self.plan.comm
    }

    fn rank(&self) -> usize {
        self.comm().group().ranks()[self.comm().group().rank()]
    }

    /// Writes and syncs this rank's file. Local: no communication.
    pub fn write_fragments(
        &self,
        fs: &dyn FileSystem,
        bytes: &mut dyn FragmentBytes,
    ) -> Result<WrittenFile, CheckpointError> {
        let written = write_fragments(fs, &self.folder, &self.plan, bytes);
        written.map_err(|(file, error)| self.io("write", &file, &error))
    }

    /// Returns what all ranks wrote. If one failed, the folder is removed.
    ///
    /// # Collective
    /// Every rank of the plan's group.
    pub fn gather(
        &self,
        fs: &dyn FileSystem,
        own: Result<WrittenFile, CheckpointError>,
    ) -> Result<Vec<WrittenFile>> {
        agree(self.comm(), "checkpoint_write", own).inspect_err(|_| self.discard(fs))
    }

    /// Writes the manifest and gives the checkpoint its name, on group rank 0. If it fails, the
    /// folder is removed. Local: no communication.
    pub fn commit(
        &self,
        fs: &dyn FileSystem,
        written: Vec<WrittenFile>,
        run: Option<&dyn RunStep>,
    ) -> Result<Committed, CheckpointError> {
        let bytes = written.iter().map(|written| written.len).collect();
        self.complete(fs, written)
            .and_then(|()| run.map_or(Ok(()), |run| run.before_commit(fs)))
            .and_then(|()| self.rename(fs))
            .inspect_err(|_| self.discard(fs))?;
        let parent = parent(&self.path);
        fs.sync_dir(parent)
            .map_err(|error| CheckpointError::io(self.rank(), "sync", parent, &error))?;
        let not_removed = run.map(|run| run.after_commit(fs)).unwrap_or_default();
        for error in &not_removed {
            log::warn!("{} is saved, but {error}", self.path.display());
        }
        Ok(Committed { bytes, not_removed })
    }

    /// Writes the manifest of what the ranks wrote, and makes the folder durable.
    fn complete(
        &self,
        fs: &dyn FileSystem,
        written: Vec<WrittenFile>,
    ) -> Result<(), CheckpointError> {
        let manifest = self.plan.manifest(written).to_bytes();
        let bytes = manifest.len() as u64;
        let limit = self.plan.limit;
        if bytes > limit {
            return Err(CheckpointError::ManifestSize { bytes, limit });
        }
        let file = self.folder.join(MANIFEST);
        write_file(fs, &file, &manifest).map_err(|error| self.io("write", &file, &error))?;
        fs.sync_dir(&self.folder)
            .map_err(|error| self.io("sync", &self.folder, &error))
    }

    /// Gives the folder the name of the checkpoint, unless another has it by now.
    fn rename(&self, fs: &dyn FileSystem) -> Result<(), CheckpointError> {
        fs.rename(&self.folder, &self.path)
            .map_err(|error| match error.kind() {
                ErrorKind::DirectoryNotEmpty => match check_free(fs, &self.path, self.rank()) {
                    Err(error) => error,
                    Ok(_) => CheckpointError::io(self.rank(), "rename", &self.path, &error),
                },
                _ => self.io("rename", &self.folder, &error),
            })
    }

    /// Returns the error of an operation in the folder, which may not be there any more.
    fn io(&self, action: &str, path: &Path, error: &io::Error) -> CheckpointError {
        match error.kind() {
            ErrorKind::NotFound => self.replaced(),
            _ => CheckpointError::io(self.rank(), action, path, error),
        }
    }

    fn replaced(&self) -> CheckpointError {
        CheckpointError::Replaced {
            path: self.folder.clone(),
        }
    }

    /// Removes the folder of a save that failed. If that fails, too, a later save removes it.
    fn discard(&self, fs: &dyn FileSystem) {
        if self.comm().group().rank() == 0 {
            let _ = fs::remove_dir_all(fs, &self.folder);
        }
    }

    pub fn report(&self, Committed { bytes, not_removed }: Committed) -> SaveReport {
        SaveReport {
            path: self.path.clone(),
            bytes,
            not_removed,
        }
    }
}

/// Result of [`OpenSave::commit`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Committed {
    /// Bytes of each rank's file.
    bytes: Vec<u64>,
    /// Errors of the removal of old checkpoints.
    not_removed: Vec<CheckpointError>,
}

/// Creates the folder into which the checkpoint `path` is written.
fn create(
    fs: &dyn FileSystem,
    path: &Path,
    claim: Claim,
    rank: usize,
    run: Option<&dyn RunStep>,
) -> Result<(), CheckpointError> {
    let io = |action: &str, path: &Path, error: io::Error| {
        CheckpointError::io(rank, action, path, &error)
    };
    if path.file_name().is_none() {
        let error = io::Error::new(ErrorKind::InvalidInput, "the path ends in no name");
        return Err(io("create", path, error));
    }
    // First, so that a name that is taken is the error, whatever else is in the run's folder.
    let is_interrupted = check_free(fs, path, rank)?;
    if let Some(run) = run {
        run.check(fs)?;
    }
    check_no_link(fs, path).map_err(|error| io("create", path, error))?;
    let parent = parent(path);
    fs.create_dir_all(parent)
        .map_err(|error| io("create", parent, error))?;
    // A folder that cannot be read could not be synced once all is written, either.
    let abandoned = abandoned(fs, path).map_err(|error| io("read", parent, error))?;
    // What cannot be removed does not keep the save from its name, and a run reports it.
    let _ = remove_all(fs, abandoned);
    let interrupted = is_interrupted.then(|| path.to_owned());
    if let Some((folder, error)) = remove_all(fs, interrupted).into_iter().next() {
        return Err(io("remove", &folder, error));
    }
    let folder = saving(path, claim);
    fs.create_dir(&folder)
        .map_err(|error| io("create", &folder, error))
}

/// Checks that a checkpoint can have this name. Returns true if there is a folder with what an
/// interrupted save of an earlier version has left.
///
/// # Errors
/// [`CheckpointError::Exists`], [`CheckpointError::Occupied`] and [`CheckpointError::Io`].
fn check_free(fs: &dyn FileSystem, path: &Path, rank: usize) -> Result<bool, CheckpointError> {
    let files = match fs.list(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        files => files.map_err(|error| CheckpointError::io(rank, "read", path, &error))?,
    };
    match foreign(&files) {
        None => Ok(!files.is_empty()),
        Some(MANIFEST) => Err(CheckpointError::Exists { path: path.into() }),
        Some(name) => Err(CheckpointError::Occupied {
            path: path.into(),
            name: name.into(),
        }),
    }
}

fn write_file(fs: &dyn FileSystem, file: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut writer = fs.create(file)?;
    writer.write_all(bytes)?;
    writer.sync()
}
