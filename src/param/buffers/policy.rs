//! [`BufferSync`]: which running statistics all ranks get.

/// Which running statistics all ranks get when [`sync_buffers`](super::sync_buffers) or
/// [`full_model`](crate::fsdp::full_model) makes them equal.
///
/// In training every rank normalizes by its own batch, and its running statistics follow that.
///
/// Statistics of one batch that lies on all ranks (synchronized batch normalization) are none of these:
/// burn's `BatchNorm` computes a batch's mean and variance inside its forward, where nothing reaches in. Of
/// a batch that is a [`DTensor`](crate::dtensor::DTensor) its second forward, `forward_dtensor`, has them, the
/// same on all ranks that share it; how to share one, the layer's docs in `nn` say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BufferSync {
    /// Those of the mesh's first rank: of the batches that one rank has seen.
    #[default]
    FirstRank,
    /// The mean over all ranks: of a batch norm's mean that of all batches, of its variance the mean
    /// variance inside a rank's batch, without what the ranks' means differ by.
    Average,
}
