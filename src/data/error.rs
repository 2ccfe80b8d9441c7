//! [`DataError`]: a dataset that cannot be divided among ranks and batches.

/// Reason why a dataset cannot be divided among data shards and batches. Every rank that passes the
/// same numbers gets the same error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The dataset has no rows.
    #[error("the dataset has no rows. Check the path or the filter that it was read with")]
    EmptyDataset,
    /// The batch size is 0.
    #[error("the batch size is 0. Use batches of at least one row on each data shard")]
    EmptyBatch,
    /// The shard's index is not below the number of shards.
    #[error(
        "data shard {index} does not exist among {count}. Use `DeviceMesh::data_shard`, or an index below {count}"
    )]
    NoSuchShard {
        /// Index of the shard.
        index: usize,
        /// Number of shards.
        count: usize,
    },
    /// The global batch cannot be divided evenly.
    #[error(
        "a global batch of {batch} rows cannot be divided evenly among {shards} data shards. Use a multiple of \
         {shards}, or set the rows of each shard with `with_batch_size`"
    )]
    UnevenBatch {
        /// Number of rows of the global batch.
        batch: usize,
        /// Number of data shards.
        shards: usize,
    },
    /// The sampler divides another dataset.
    #[error(
        "the sampler divides {sampler} rows, but the dataset has {dataset}. Create it with \
         `DistributedSampler::new(dataset.len(), shard)`"
    )]
    OtherDataset {
        /// Number of rows of the sampler.
        sampler: usize,
        /// Number of rows of the dataset.
        dataset: usize,
    },
    /// A batcher that does not see which rows are padding would get padding.
    #[error(
        "`LastBatch::Pad` adds padding to the last batch, and this batcher would count it like other rows. Use \
         `DistributedLoader::with_padding`, whose batcher takes `(item, is_padding)`, or `LastBatch::Drop`"
    )]
    UnseenPadding,
    /// Every row would be dropped.
    #[error(
        "the dataset has {rows} rows, fewer than one global batch of {batch} over {shards} data shards, and \
         `LastBatch::Drop` drops incomplete batches. Use smaller batches or fewer data shards, or `LastBatch::Pad`"
    )]
    NoFullBatch {
        /// Number of rows of the dataset.
        rows: usize,
        /// Number of rows of the global batch.
        batch: usize,
        /// Number of data shards.
        shards: usize,
    },
}
