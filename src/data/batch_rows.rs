//! [`BatchRows`] and [`EpochBatches`]: the rows of one data shard, batch by batch.

use std::iter::FusedIterator;
use std::ops::Range;
use std::sync::Arc;

use super::DataShard;

/// The rows of one batch on one data shard: indices into the dataset.
///
/// Padding comes last, and only in the last batch of an epoch with
/// [`LastBatch::Pad`](super::LastBatch::Pad).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchRows {
    epoch: usize,
    index: usize,
    step: usize,
    rows: Vec<usize>,
    num_real: usize,
}

impl BatchRows {
    /// Returns the epoch, counted from 0.
    pub fn epoch(&self) -> usize {
        self.epoch
    }

    /// Returns the index of the batch in its epoch.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the number of batches before this one in all epochs. A run that has completed this
    /// batch resumes with [`steps_from(step + 1)`](super::DistributedSampler::steps_from).
    pub fn step(&self) -> usize {
        self.step
    }

    /// Returns all rows, real rows first. Every shard has equally many.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Returns all rows, real rows first.
    pub fn into_rows(self) -> Vec<usize> {
        self.rows
    }

    /// Returns the rows that are not padding. It may be empty on a shard if the dataset ends before
    /// its part of the batch.
    pub fn real_rows(&self) -> &[usize] {
        &self.rows[..self.num_real]
    }

    /// Returns true for each row that is padding. It has the length and order of
    /// [`rows`](Self::rows).
    pub fn is_padding(&self) -> Vec<bool> {
        (0..self.rows.len()).map(|at| at >= self.num_real).collect()
    }
}

/// The order of one epoch, and its division into batches and shards.
#[derive(Debug, Clone)]
pub(super) struct EpochOrder {
    pub(super) epoch: usize,
    /// Number of rows of the dataset.
    pub(super) len: usize,
    /// Order of the rows; `None` if they are not shuffled.
    pub(super) shuffled: Option<Arc<Vec<usize>>>,
    pub(super) shard: DataShard,
    /// Rows of a batch on each shard.
    pub(super) batch_size: usize,
    /// Number of batches.
    pub(super) num_batches: usize,
    /// True if the last batch is divided evenly among the shards.
    pub(super) is_even: bool,
}

impl EpochOrder {
    /// Returns the rows of batch `index`: the shard's part of the global batch.
    fn batch(&self, index: usize) -> BatchRows {
        let (rows, num_real) = self.rows(index * self.batch_size..(index + 1) * self.batch_size);
        BatchRows {
            epoch: self.epoch,
            index,
            step: self.epoch * self.num_batches + index,
            rows,
            num_real,
        }
    }

    /// Returns the rows at `positions` among those of this shard, and how many of them are not
    /// padding. Positions past the end of the dataset are padding, and start again at the beginning
    /// of the order.
    ///
    /// ```text
    /// order of the epoch     7 2 9 0   4 8 1 6   3 5 7 2
    /// positions on shard 0   0 1       2 3       4 5
    /// positions on shard 1       0 1       2 3       4 5
    /// ```
    pub(super) fn rows(&self, positions: Range<usize>) -> (Vec<usize>, usize) {
        let Self {
            len,
            shard,
            batch_size,
            ..
        } = *self;
        let in_order = |own: usize| {
            (own / batch_size * shard.count + shard.index) * batch_size + own % batch_size
        };
        // The row in the order of the epoch, or `None` for padding.
        let real = |own: usize| {
            let begin = own / batch_size * batch_size * shard.count;
            let rest = len.saturating_sub(begin);
            if !self.is_even || rest >= batch_size * shard.count {
                return Some(in_order(own)).filter(|position| *position < len);
            }
            let [first, end] = [shard.index, shard.index + 1]
                .map(|index| index * (rest / shard.count) + index.min(rest % shard.count));
            let position = first + own % batch_size;
            (position < end).then_some(begin + position)
        };
        let row = |position: usize| {
            self.shuffled
                .as_ref()
                .map_or(position, |order| order[position])
        };
        let num_real = positions
            .clone()
            .take_while(|&own| real(own).is_some())
            .count();
        let rows = positions.map(|own| row(real(own).unwrap_or_else(|| in_order(own) % len)));
        (rows.collect(), num_real)
    }
}

/// Iterator over the batches of one epoch on one data shard. [`skip`](Iterator::skip) takes
/// constant time.
#[derive(Debug, Clone)]
pub struct EpochBatches {
    order: EpochOrder,
    left: Range<usize>,
}

impl EpochBatches {
    pub(super) fn new(order: EpochOrder) -> Self {
        Self {
            left: 0..order.num_batches,
            order,
        }
    }
}

impl Iterator for EpochBatches {
    type Item = BatchRows;

    fn next(&mut self) -> Option<BatchRows> {
        self.nth(0)
    }

    fn nth(&mut self, count: usize) -> Option<BatchRows> {
        self.left.nth(count).map(|index| self.order.batch(index))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.left.size_hint()
    }
}

impl ExactSizeIterator for EpochBatches {}

impl FusedIterator for EpochBatches {}
