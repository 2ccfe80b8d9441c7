//! [`supervised`]: burn's `SupervisedTraining` on a mesh, and [`with_checkpoints`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::train::{InferenceStep, LearnerModel, SupervisedTraining, TrainStep, TrainingStrategy};

use super::epoch_checkpoints::EpochCheckpoints;
use super::epoch_renderer::EpochRenderer;
use super::gather::GatherOutput;
use super::strategy::OnMesh;
use crate::Result;
use crate::mesh::DeviceMesh;

/// Creates burn's `SupervisedTraining` for the ranks of `mesh`, in place of
/// `SupervisedTraining::new`.
///
/// Configure it and launch it as burn's guide does, in the same way on every rank. `mesh` contains
/// the ranks that have distinct rows, such as the slice `dp` of a mesh `[dp, tp]`; all ranks of its
/// [root](DeviceMesh::root) decide together. `train` and `valid` yield this rank's rows: in every
/// step, the same number on each rank for training, any number for validation.
///
/// `directory` is the same on all ranks. Each writes to its own folder inside it, see
/// [`rank_directory`]. Only the first rank of the root draws, prints the summary and installs
/// burn's application logger, unless the program sets another renderer or logger afterwards.
/// [`EpochRenderer`] prints one line for each epoch.
///
/// See the [module](super) for an example, and for what the ranks decide together.
///
/// # Collective
/// Local. Launching the training is collective: every rank of the root mesh launches one with the
/// same settings. burn's `launch` cannot return an error of this crate, so the rank
/// [unwinds](crate::Error::unwind) with it, and [`launch`](crate::comm::launch) returns it. Errors
/// of a rank's data, metrics or checkpoints, which burn returns in `LearningResult::error`, become
/// a [`TrainError::Failed`](super::TrainError::Failed) on every rank.
///
/// # Errors
/// [`NotAMember`](crate::mesh::MeshError::NotAMember) outside the mesh.
pub fn supervised<M: LearnerModel>(
    mesh: &DeviceMesh,
    directory: impl AsRef<Path>,
    train: Arc<dyn DataLoader<<M as TrainStep>::Input>>,
    valid: Arc<dyn DataLoader<<M as InferenceStep>::Input>>,
) -> Result<SupervisedTraining<M>>
where
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    mesh.member("train on it")?;
    let training = SupervisedTraining::new(rank_directory(mesh, directory), train, valid)
        .with_training_strategy(TrainingStrategy::Custom(Arc::new(OnMesh {
            mesh: mesh.clone(),
            checkpoints: None,
        })));
    Ok(match mesh.root().ranks()[0] == mesh.rank() {
        true => training,
        // It prints nothing on these ranks.
        false => training
            .renderer(Box::new(EpochRenderer::new(mesh)))
            .with_application_logger(None),
    })
}

/// Returns a training of [`supervised`] on `mesh` that also saves model, optimizer, schedule and
/// [random numbers](crate::dtensor::ops::random) at the end of each epoch, as its step.
/// [`resume`](super::resume) loads them, on any mesh and any number of ranks.
///
/// `checkpoints` is a [`CheckpointManager`](crate::checkpoint::CheckpointManager), which decides how
/// many are kept, or [`EpochCheckpoints`], which can also keep the best, return it, and save state
/// of the program. The manager's mesh is the root of `mesh`.
///
/// burn's own checkpointers are not needed next to it. Early stopping is not saved, as burn does
/// not save it either.
///
/// # Collective
/// Local. The launched training unwinds on every rank with the errors of
/// [`CheckpointManager::save`](crate::checkpoint::CheckpointManager::save), and with
/// [`TrainError::NoMetric`](super::TrainError::NoMetric).
#[must_use]
pub fn with_checkpoints<M: LearnerModel>(
    training: SupervisedTraining<M>,
    mesh: &DeviceMesh,
    checkpoints: impl Into<EpochCheckpoints>,
) -> SupervisedTraining<M>
where
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    let strategy = OnMesh {
        mesh: mesh.clone(),
        checkpoints: Some(checkpoints.into()),
    };
    training.with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
}

/// Returns the folder of this rank inside `directory`: `rank-0`, `rank-1`, .. by global rank.
/// burn's default checkpointers write the rank's shards there, and burn's loggers the metrics,
/// which are the same on all ranks. Local.
pub fn rank_directory(mesh: &DeviceMesh, directory: impl AsRef<Path>) -> PathBuf {
    directory.as_ref().join(format!("rank-{}", mesh.rank()))
}
