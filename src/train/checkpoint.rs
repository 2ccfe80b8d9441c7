//! [`last_checkpoint`]: the epoch from which all ranks can resume.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::optim::OptimizerRecord;
use burn::store::ModuleRecord;
use itertools::Itertools;

use super::{TrainError, rank_directory};
use crate::Result;
use crate::comm::Call;
use crate::mesh::DeviceMesh;

/// Returns the last epoch of which every rank has a complete checkpoint in `directory`, as burn's
/// default checkpointers of [`supervised`](super::supervised) write them; `None` if there is none.
/// Pass it to burn's `SupervisedTraining::checkpoint`.
///
/// A training that was killed while it wrote may leave a file that cannot be read, or an epoch that
/// only some ranks have written. Both are passed over. So keep at least two checkpoints, as burn's
/// default strategy does: a rank removes the files of an old one while others, or other files of
/// its own, are still to be written.
///
/// # Collective
/// Every rank of the root mesh.
///
/// # Errors
/// [`TrainError::OtherRanks`] on every rank if other ranks than those of the root mesh have written
/// the checkpoints, and [`TrainError::NoCommonEpoch`] if there are files of an epoch after the
/// first, but of no epoch all; [`NotAMember`](crate::mesh::MeshError::NotAMember) outside the mesh,
/// [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn last_checkpoint(mesh: &DeviceMesh, directory: impl AsRef<Path>) -> Result<Option<usize>> {
    mesh.member("resume on it")?;
    let directory = directory.as_ref();
    let folder = rank_directory(mesh, directory).join("checkpoint");
    let begun = names(&folder).filter_map(|name| epoch_of(&name)).max();
    let own = (complete(&folder), begun, writers(directory));
    let root = mesh.root();
    let comm = root.all()?;
    let of_ranks = comm.all_gather_object(Call::new("train_checkpoint"), &own)?;
    let (epochs, begun, writers): (Vec<_>, Vec<_>, Vec<_>) = of_ranks.into_iter().multiunzip();
    // Ranks on another host may see other folders.
    let writers: Writers = writers.into_iter().flatten().collect();
    if writers.values().any(|&has_model| has_model)
        && !writers.keys().eq(root.ranks().iter().sorted())
    {
        let directory = directory.display().to_string();
        let found = writers.into_keys().collect();
        return Err(TrainError::OtherRanks {
            directory,
            found,
            ranks: root.ranks().to_vec(),
        }
        .into());
    }
    let last: Vec<_> = epochs
        .iter()
        .map(|of_rank: &BTreeSet<usize>| of_rank.last().copied())
        .collect();
    let of_all = epochs
        .into_iter()
        .reduce(|a, b| &a & &b)
        .expect("a mesh has ranks");
    // A training that was killed in its first save has nothing to resume from.
    if of_all.is_empty() && begun.into_iter().flatten().max() > Some(1) {
        return Err(TrainError::NoCommonEpoch {
            directory: directory.display().to_string(),
            last,
        }
        .into());
    }
    Ok(of_all.last().copied())
}

/// Ranks that have a folder for checkpoints, each with true if there is a model in it. burn creates
/// the folder before the first step.
type Writers = BTreeMap<usize, bool>;

fn writers(directory: &Path) -> Writers {
    let writer = |folder: String| {
        let rank = folder.strip_prefix("rank-")?.parse().ok()?;
        let checkpoints = directory.join(folder).join("checkpoint");
        let has_model = names(&checkpoints).any(|name| epoch_of_model(&name).is_some());
        checkpoints.is_dir().then_some((rank, has_model))
    };
    names(directory).filter_map(writer).collect()
}

/// Returns the names in a folder; none if it does not exist.
fn names(folder: &Path) -> impl Iterator<Item = String> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
}

/// Files of a checkpoint.
const FILES: [&str; 3] = ["model", "optim", "scheduler"];

/// Returns the epoch of a file of a checkpoint, by its name.
fn epoch_of(name: &str) -> Option<usize> {
    let (file, epoch) = name.strip_suffix(".bpk")?.split_once('-')?;
    FILES.contains(&file).then(|| epoch.parse().ok()).flatten()
}

fn epoch_of_model(name: &str) -> Option<usize> {
    epoch_of(name).filter(|_| name.starts_with(FILES[0]))
}

/// Returns the epochs of which the folder has all files, and all can be read.
fn complete(folder: &Path) -> BTreeSet<usize> {
    let file = |name: &str, epoch: usize| folder.join(format!("{name}-{epoch}.bpk"));
    let is_read = |&epoch: &usize| {
        ModuleRecord::load(file("model", epoch)).is_ok()
            && OptimizerRecord::load(file("optim", epoch)).is_ok()
            && LrSchedulerRecord::load(file("scheduler", epoch)).is_ok()
    };
    names(folder)
        .filter_map(|name| epoch_of_model(&name))
        .filter(is_read)
        .collect()
}
