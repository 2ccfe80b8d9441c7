//! [`OpenSave`]: a save in progress, from the creation of its folder to its manifest.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::CheckpointError;
use super::fragments::{FragmentBytes, write_fragments};
use super::fs::{self, FileSystem, Links, MANIFEST, parent};
use super::save_plan::{SavePlan, WrittenFile, rank_of_file};
use super::save_report::SaveReport;
use crate::Result;
use crate::comm::{Communicator, agree, agree_on_first};

const MARKER: &str = "probe-";

/// Run to which a checkpoint belongs.
pub(super) trait RunStep: Send + Sync {
    /// Returns the checkpoint that was the latest of the run: its step and the checksum of its
    /// manifest.
    fn previous(&self, fs: &dyn FileSystem) -> Result<Option<(u64, u64)>, CheckpointError>;
    /// Makes the checkpoint, which is complete, the latest of the run. Returns an error for each
    /// old one that could not be removed.
    fn commit(&self, fs: &dyn FileSystem) -> Result<Vec<CheckpointError>, CheckpointError>;
}

/// A save whose folder exists. Its steps are to be called in the order of its methods.
pub(super) struct OpenSave {
    path: PathBuf,
    plan: SavePlan,
    /// File by which all ranks recognize the folder.
    marker: String,
}

impl OpenSave {
    /// Creates the folder.
    ///
    /// # Collective
    /// Every rank of the plan's group.
    pub fn begin(fs: &dyn FileSystem, path: &Path, plan: SavePlan) -> Result<Self> {
        let (comm, ranks) = (&plan.comm, plan.comm.group().ranks());
        let rank = ranks[comm.group().rank()];
        let marker = agree_on_first(comm, "checkpoint_folder", || create(fs, path, rank))?;
        let seen = match fs.open(&path.join(&marker), Links::Refuse) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(match rank == ranks[0] {
                true => CheckpointError::Replaced { path: path.into() },
                false => CheckpointError::NotShared {
                    path: path.into(),
                    rank,
                    of: ranks[0],
                },
            }),
            seen => seen
                .map(drop)
                .map_err(|error| CheckpointError::io(rank, "open", &path.join(&marker), &error)),
        };
        agree(comm, "checkpoint_probe", seen).inspect_err(|_| discard(fs, path, &marker, comm))?;
        Ok(Self {
            path: path.into(),
            plan,
            marker,
        })
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
        let written = write_fragments(fs, &self.path, &self.plan, bytes);
        written.map_err(|(file, error)| CheckpointError::io(self.rank(), "write", &file, &error))
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
        agree(self.comm(), "checkpoint_write", own).inspect_err(|_| self.discard(fs, &self.marker))
    }

    /// Writes the manifest, on group rank 0. Local: no communication.
    pub fn commit(
        &self,
        fs: &dyn FileSystem,
        written: Vec<WrittenFile>,
        run: Option<&dyn RunStep>,
    ) -> Result<Committed, CheckpointError> {
        let path = &self.path;
        let io = |action, path: &Path| {
            let rank = self.rank();
            let path = path.to_owned();
            move |error| CheckpointError::io(rank, action, &path, &error)
        };
        let bytes = written.iter().map(|written| written.len).collect();
        let manifest = self
            .manifest_bytes(fs, written, run)
            .inspect_err(|_| self.discard(fs, &self.marker))?;
        // Another save under this name would have removed the probe, with the files of this one.
        // Under its new name it is there until the manifest is: without either, the folder would be
        // taken for the rest of a removal.
        let marker = path.join(&self.marker);
        let own_marker = marker_name();
        fs.rename(&marker, &path.join(&own_marker))
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => CheckpointError::Replaced { path: path.clone() },
                _ => io("rename", &marker)(error),
            })?;
        let file = path.join(MANIFEST);
        let synced = fs.sync_dir(path).map_err(io("sync", path));
        let put = synced
            .and_then(|()| fs::write_atomically(fs, &file, &manifest).map_err(io("write", &file)));
        put.inspect_err(|_| {
            // If only the last sync failed, it may be complete.
            if fs
                .open(&file, Links::Refuse)
                .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
            {
                self.discard(fs, &own_marker);
            }
        })?;
        let parent = parent(path);
        fs.sync_dir(parent).map_err(io("sync", parent))?;
        // If it stays, it does no harm.
        let _ = fs.remove_file(&path.join(&own_marker));
        let not_removed = run
            .map(|run| run.commit(fs))
            .transpose()?
            .unwrap_or_default();
        not_removed
            .iter()
            .for_each(|error| log::warn!("{} is saved, but {error}", path.display()));
        Ok(Committed { bytes, not_removed })
    }

    /// Returns the manifest of what the ranks wrote.
    fn manifest_bytes(
        &self,
        fs: &dyn FileSystem,
        written: Vec<WrittenFile>,
        run: Option<&dyn RunStep>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let mut manifest = self.plan.manifest(written);
        manifest.previous = run.map(|run| run.previous(fs)).transpose()?.flatten();
        let manifest = manifest.to_bytes();
        let bytes = manifest.len() as u64;
        let limit = self.plan.limit;
        if bytes > limit {
            Err(CheckpointError::ManifestSize { bytes, limit })
        } else {
            Ok(manifest)
        }
    }

    fn discard(&self, fs: &dyn FileSystem, marker: &str) {
        discard(fs, &self.path, marker, self.comm());
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

/// Removes the folder of a save that failed, unless another save has taken its place since: then it
/// has another probe. If that fails, too, it is debris, which the next save removes.
fn discard(fs: &dyn FileSystem, path: &Path, marker: &str, comm: &Communicator) {
    if comm.group().rank() == 0 && fs.remove_file(&path.join(marker)).is_ok() {
        let _ = fs::remove_dir_all(fs, path);
    }
}

/// Returns a name that no other save gives to its probe.
fn marker_name() -> String {
    format!("{MARKER}{:016x}", nonce())
}

/// Creates the folder, and a file in it by which other ranks recognize it.
fn create(fs: &dyn FileSystem, path: &Path, rank: usize) -> Result<String, CheckpointError> {
    let io = |action: &str, path: &Path, error: io::Error| {
        CheckpointError::io(rank, action, path, &error)
    };
    match fs.list(path) {
        Ok(entries) => {
            if entries.iter().any(|entry| entry.name == MANIFEST) {
                return Err(CheckpointError::Exists { path: path.into() });
            }
            let is_marker = |name: &str| {
                name.strip_prefix(MARKER)
                    .is_some_and(|nonce| nonce.len() == 16)
            };
            let is_ours = |name: &str| {
                rank_of_file(name).is_some() || is_marker(name) || name == "manifest.json.tmp"
            };
            if let Some(other) = entries
                .iter()
                .find(|entry| entry.is_dir || !is_ours(&entry.name))
            {
                return Err(CheckpointError::Occupied {
                    path: path.into(),
                    name: other.name.clone(),
                });
            }
            fs::remove_dir_all(fs, path).map_err(|error| io("remove", path, error))?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io("read", path, error)),
    }
    let parent = parent(path);
    fs.create_dir_all(parent)
        .map_err(|error| io("create", parent, error))?;
    fs.create_dir(path)
        .map_err(|error| io("create", path, error))?;
    let marker = marker_name();
    fs.create(&path.join(&marker))
        .map_err(|error| io("create", path, error))?;
    Ok(marker)
}

/// Returns a number that no other save has, with all likelihood.
fn nonce() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}
