//! [`BufferSync`]: policy that makes running statistics equal on all ranks.

/// Policy by which [`sync_buffers`](super::sync_buffers) and [`full_model`](crate::fsdp::full_model) make running
/// statistics equal on all ranks.
///
/// In training, every rank normalizes by its own batch, and its running statistics follow that batch.
///
/// This policy does not provide synchronized batch normalization, in which statistics are those of one batch over
/// all ranks. burn's `BatchNorm` computes the mean and variance of a batch inside its forward, where this crate
/// cannot intervene. For a batch that is a [`DTensor`](crate::dtensor::DTensor), its second forward
/// `forward_dtensor` computes statistics that are the same on all ranks of the batch. The documentation of the
/// layer in `nn` describes how to shard a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BufferSync {
    /// The statistics of the mesh's first rank, which has seen only its own batches.
    #[default]
    FirstRank,
    /// The mean of the statistics over all ranks. For a batch norm's mean, this is the mean of all batches. For its
    /// variance, it is the mean of the variances within each rank's batch, without the variance between the ranks'
    /// means.
    Average,
}
