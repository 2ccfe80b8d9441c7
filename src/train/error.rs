//! [`TrainError`]: errors of a training on several ranks.

use itertools::Itertools;
use serde::{Deserialize, Serialize};

/// Error of a training that [`supervised`](super::supervised) prepared.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Some ranks have a further batch of the training set, and others do not, although all have the
    /// same number of rows.
    #[error(
        "in epoch {epoch}, the training loaders of ranks {ended:?} ended after {batches} batches, those of ranks \
         {further:?} did not. Give every rank the same number of batches. The loaders report the same number of rows, so their batch sizes \
         probably differ"
    )]
    UnevenBatches {
        /// The epoch, counted from 1.
        epoch: usize,
        /// Number of batches that every rank had.
        batches: usize,
        /// Global ranks that have no further batch.
        ended: Vec<usize>,
        /// Global ranks that have one.
        further: Vec<usize>,
    },
    /// Ranks have different numbers of rows to train on, and the model has experts on a mesh of their
    /// own.
    #[error(
        "the training loaders of the ranks have different numbers of rows, and the model has experts of expert parallelism, \
         whose gradients contain the losses of several ranks and cannot be weighted. Give every rank as many rows: a \
         `DistributedLoader` with `LastBatch::Drop`"
    )]
    UnevenExperts,
    /// The loader of some ranks is empty, while that of others is not.
    #[error(
        "the loaders of ranks {empty:?} have no rows of the {split} split, those of other ranks do. \
         Give every rank at least one row: a rank without a batch takes part with a row that is not counted"
    )]
    NoRows {
        /// `train` or `valid`.
        split: String,
        /// Global ranks without rows.
        empty: Vec<usize>,
    },
    /// The checkpoints of a folder were written by other ranks than those of the mesh.
    #[error(
        "the checkpoints in `{directory}` are of {} ranks, this training has {}: a checkpoint holds each rank's shards, \
         and resumes on as many ranks only. Resume on {}, or train in another folder. To continue on other ranks, save by \
         `with_checkpoints`",
        .found.len(), .ranks.len(), .found.len()
    )]
    OtherRanks {
        /// The folder of the training.
        directory: String,
        /// Global ranks with a folder of checkpoints in it.
        found: Vec<usize>,
        /// Global ranks of the mesh.
        ranks: Vec<usize>,
    },
    /// The training is to return the best model, and nothing says which is the best.
    #[error(
        "the training is to return the best model, but no metric says which it is. Call `with_best` of the \
         `EpochCheckpoints` or of their `CheckpointManager`"
    )]
    NoBest,
    /// The training does not compute the metric by which the best checkpoint is kept.
    #[error(
        "the training has no numeric metric `{metric}` of the {split} split in epoch {epoch}, by which the best checkpoint \
         is kept. Pass the metric to `metrics`, with the same name"
    )]
    NoMetric {
        /// Name of the metric.
        metric: String,
        /// `train` or `valid`.
        split: String,
        /// The epoch, counted from 1.
        epoch: usize,
    },
    /// A folder has checkpoints of more than one epoch, or of a later one than the first, but none
    /// that all ranks have completely.
    #[error(
        "no epoch in `{directory}` was saved completely by all ranks: the last that each has are [{}]. A training that \
         keeps one checkpoint may be killed when some files of the one before are removed and some of the next are not \
         written. Keep at least two, or save by `with_checkpoints`. To train from the beginning, remove the folders of all \
         ranks",
        .last.iter().map(|epoch| epoch.map_or("none".into(), |epoch| epoch.to_string())).join(", ")
    )]
    NoCommonEpoch {
        /// The folder of the training.
        directory: String,
        /// The last complete epoch of each rank of the mesh, if it has one.
        last: Vec<Option<usize>>,
    },
    /// A rank's data loader, a metric or a checkpoint failed.
    #[error("the training stopped because rank {rank} failed: {error}")]
    Failed {
        /// Global rank that failed.
        rank: usize,
        /// Text of its error.
        error: String,
    },
    /// The model has no parameter that is distributed over the mesh.
    #[error(
        "no parameter of the model is distributed over {mesh}, so that its {ranks} ranks would train {ranks} different \
         models. Call `fully_shard` on the model, with this mesh, before `Learner::new`"
    )]
    NotDistributed {
        /// The mesh.
        mesh: String,
        /// Number of its ranks.
        ranks: usize,
    },
    /// The model is on a device without autodiff.
    #[error(
        "the model is on a device without autodiff, and `Learner` cannot move parameters that are distributed. \
         Initialize it on `world.device().clone().autodiff()` before `fully_shard`"
    )]
    NoAutodiff,
    /// A tensor of a step's output does not have one entry per row along its first dimension.
    #[error(
        "a tensor of the step's output has length {len} along dimension 0, but the batch has {rows} rows. \
         Give every gathered tensor one entry per row; a loss may also have one entry in all"
    )]
    OutputRows {
        /// Length of the tensor along dimension 0.
        len: usize,
        /// Number of rows of the rank's batch, as the output reports it.
        rows: usize,
    },
}
