//! [`last_checkpoint`]: the epoch from which all ranks can resume.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::optim::OptimizerRecord;
use burn::store::ModuleRecord;

use super::rank_directory;
use crate::Result;
use crate::comm::Call;
use crate::mesh::DeviceMesh;

/// Returns the last epoch of which every rank has a complete checkpoint in `directory`, as burn's default checkpointers
/// of [`supervised`](super::supervised) write them; `None` if there is none. Pass it to burn's
/// `SupervisedTraining::checkpoint`.
///
/// A training that was killed while it wrote may leave a file that cannot be read, or an epoch that only some ranks
/// have written. Both are passed over.
///
/// # Collective
/// Every rank of the root mesh.
///
/// # Errors
/// [`NotAMember`](crate::mesh::MeshError::NotAMember) outside the mesh, [`Error::Comm`](crate::Error::Comm) if another
/// rank fails.
pub fn last_checkpoint(mesh: &DeviceMesh, directory: impl AsRef<Path>) -> Result<Option<usize>> {
    mesh.member("resume on it")?;
    let own = complete(&rank_directory(mesh, directory).join("checkpoint"));
    let root = mesh.root();
    let comm = root.all()?;
    let of_ranks = comm.all_gather_object(Call::new("train_checkpoint"), &own)?;
    let of_all = of_ranks.into_iter().reduce(|a, b| &a & &b).expect("a mesh has ranks");
    Ok(of_all.last().copied())
}

/// Returns the epochs of which the folder has all files, and all can be read.
fn complete(folder: &Path) -> BTreeSet<usize> {
    let entries =
        fs::read_dir(folder).into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let epochs = entries.filter_map(|name| name.strip_prefix("model-")?.strip_suffix(".bpk")?.parse().ok());
    let file = |name: &str, epoch: usize| folder.join(format!("{name}-{epoch}.bpk"));
    let is_read = |&epoch: &usize| {
        ModuleRecord::load(file("model", epoch)).is_ok()
            && OptimizerRecord::load(file("optim", epoch)).is_ok()
            && LrSchedulerRecord::load(file("scheduler", epoch)).is_ok()
    };
    epochs.filter(is_read).collect()
}
