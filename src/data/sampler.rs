//! [`DistributedSampler`]: the division of a dataset into epochs, batches and data shards.

use std::sync::Arc;

use super::batch_rows::EpochOrder;
use super::shuffle::shuffled;
use super::{BatchRows, DataError, DataShard, EpochBatches};
use crate::Result;

/// The batches of one data shard: which rows of a dataset, in which order.
///
/// Local: nothing is sent. Every rank creates it with the same arguments, apart from its own shard.
/// See the [module](super) for a picture and an example.
///
/// | setting | default |
/// |---|---|
/// | rows of a batch | one row on each shard |
/// | order | that of the dataset |
/// | last batch | [`LastBatch::Drop`] |
///
/// The order of an epoch is drawn by each rank: 8 bytes for each row of the dataset. Without a
/// shuffle it takes no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DistributedSampler {
    len: usize,
    shard: DataShard,
    batch_size: BatchSize,
    seed: Option<u64>,
    last_batch: LastBatch,
}

/// Rows that remain at the end of an epoch, too few for a global batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LastBatch {
    /// Leaves them out. The usual choice for training: in the next epoch other rows come last.
    #[default]
    Drop,
    /// Fills their batch with rows from the beginning of the epoch's order, again and again if the
    /// dataset is smaller than a batch. [`BatchRows`] says which rows are padding. The choice for
    /// evaluation, where each row counts once.
    Pad,
    /// Divides them evenly among the shards, each of which then pads its part like `Pad`: 7 rows on 3
    /// shards are 3, 2 and 2 rows. The choice for `train::supervised`, and for evaluation where as many
    /// shards as possible need a row.
    Even,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BatchSize {
    PerShard(usize),
    Global(usize),
}

impl DistributedSampler {
    /// Creates a sampler of `len` rows for one data shard.
    pub fn new(len: usize, shard: DataShard) -> Self {
        Self {
            len,
            shard,
            batch_size: BatchSize::PerShard(1),
            seed: None,
            last_batch: LastBatch::default(),
        }
    }

    /// Sets the number of rows of a batch on each shard. The global batch grows with the number of
    /// shards.
    pub fn with_batch_size(self, rows: usize) -> Self {
        Self {
            batch_size: BatchSize::PerShard(rows),
            ..self
        }
    }

    /// Sets the number of rows of a batch over all shards. It must be divisible by the number of
    /// shards.
    pub fn with_global_batch_size(self, rows: usize) -> Self {
        Self {
            batch_size: BatchSize::Global(rows),
            ..self
        }
    }

    /// Shuffles the rows, in another order in each epoch. Use the same seed on every rank.
    pub fn with_shuffle(self, seed: u64) -> Self {
        Self {
            seed: Some(seed),
            ..self
        }
    }

    /// Sets what happens to rows that do not fill a global batch.
    pub fn with_last_batch(self, last_batch: LastBatch) -> Self {
        Self { last_batch, ..self }
    }

    /// Returns the number of rows of the dataset.
    pub fn num_rows(&self) -> usize {
        self.len
    }

    /// Returns the data shard.
    pub fn shard(&self) -> DataShard {
        self.shard
    }

    /// Returns the number of batches of an epoch, which is the same on every shard.
    ///
    /// # Errors
    /// As [`epoch`](Self::epoch).
    pub fn num_batches(&self) -> Result<usize> {
        Ok(self.divide(0)?.num_batches)
    }

    /// Returns the number of rows of each batch on each shard.
    ///
    /// # Errors
    /// As [`epoch`](Self::epoch).
    pub fn batch_size(&self) -> Result<usize> {
        Ok(self.divide(0)?.batch_size)
    }

    /// Returns the batches of epoch `epoch`, counted from 0. `sampler.epoch(epoch)?.skip(n)`
    /// resumes after `n` of them.
    ///
    /// # Errors
    /// [`EmptyDataset`](DataError::EmptyDataset), [`EmptyBatch`](DataError::EmptyBatch),
    /// [`NoSuchShard`](DataError::NoSuchShard), [`UnevenBatch`](DataError::UnevenBatch) if the
    /// number of shards does not divide the global batch, and
    /// [`NoFullBatch`](DataError::NoFullBatch) if [`LastBatch::Drop`] would drop every row.
    pub fn epoch(&self, epoch: usize) -> Result<EpochBatches> {
        Ok(EpochBatches::new(self.order(epoch)?))
    }

    /// Returns the order of epoch `epoch` and its division.
    pub(super) fn order(&self, epoch: usize) -> Result<EpochOrder, DataError> {
        let order = self.divide(epoch)?;
        Ok(EpochOrder {
            shuffled: self
                .seed
                .map(|seed| Arc::new(shuffled(self.len, seed, epoch))),
            ..order
        })
    }

    /// Returns the batches from step `step` on, epoch after epoch without an end. Steps are counted
    /// from 0 over all epochs, so a checkpoint needs to hold only the number of completed steps.
    ///
    /// The number of shards may be another one than before, as long as the global batch size is the
    /// same.
    ///
    /// # Errors
    /// As [`epoch`](Self::epoch).
    pub fn steps_from(
        &self,
        step: usize,
    ) -> Result<impl Iterator<Item = BatchRows> + Send + use<>> {
        let sampler = *self;
        let num_batches = self.num_batches()?;
        let first = step / num_batches;
        let skipped = step % num_batches;
        let batches = move |epoch| {
            let batches = sampler
                .epoch(epoch)
                .expect("a sampler that has one epoch has all");
            batches.skip(if epoch == first { skipped } else { 0 })
        };
        Ok((first..).flat_map(batches))
    }

    /// Returns true if batches may have padding.
    #[cfg(feature = "dataset")]
    pub(super) fn pads(&self) -> bool {
        self.last_batch != LastBatch::Drop
    }

    /// Returns the division of epoch `epoch` into batches, in the order of the dataset.
    fn divide(&self, epoch: usize) -> Result<EpochOrder, DataError> {
        let Self { len, shard, .. } = *self;
        let DataShard { index, count } = shard;
        if index >= count {
            return Err(DataError::NoSuchShard { index, count });
        }
        let batch = match self.batch_size {
            BatchSize::PerShard(rows) => rows.saturating_mul(count),
            BatchSize::Global(rows) => rows,
        };
        if batch == 0 {
            return Err(DataError::EmptyBatch);
        }
        if !batch.is_multiple_of(count) {
            return Err(DataError::UnevenBatch {
                batch,
                shards: count,
            });
        }
        if len == 0 {
            return Err(DataError::EmptyDataset);
        }
        let num_batches = match self.last_batch {
            LastBatch::Drop => len / batch,
            LastBatch::Pad | LastBatch::Even => len.div_ceil(batch),
        };
        if num_batches == 0 {
            return Err(DataError::NoFullBatch {
                rows: len,
                batch,
                shards: count,
            });
        }
        Ok(EpochOrder {
            epoch,
            len,
            shuffled: None,
            shard,
            batch_size: batch / count,
            num_batches,
            is_even: self.last_batch == LastBatch::Even,
        })
    }
}
