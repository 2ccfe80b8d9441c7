//! [`SaveReport`]: what a save returns.

use std::fmt;
use std::path::PathBuf;

use super::CheckpointError;

/// Report of [`save`](super::save()), identical on every rank.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SaveReport {
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Bytes that each rank of the state's mesh wrote, in the order of the mesh.
    pub bytes: Vec<u64>,
    /// Errors of the removal of old checkpoints, of which a
    /// [`CheckpointManager`](super::CheckpointManager) keeps only some. The checkpoint is saved,
    /// and the next save tries to remove them again.
    pub not_removed: Vec<CheckpointError>,
}

impl fmt::Display for SaveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.bytes.iter().sum::<u64>();
        let most = self.bytes.iter().max().copied().unwrap_or_default();
        write!(
            f,
            "{}: {total} bytes by {} ranks, at most {most} by one",
            self.path.display(),
            self.bytes.len()
        )?;
        self.not_removed
            .iter()
            .try_for_each(|error| write!(f, "; {error}"))
    }
}
