//! [`DistributedLoader`]: burn's `DataLoader` over the rows of a sampler.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::Device;

use super::batch_rows::EpochOrder;
use super::workers::Workers;
use super::{DataError, DistributedSampler};
use crate::Result;

/// Number of batches that each worker prefetches.
const READY: usize = 2;

/// A data loader of the calling rank's batches, for burn's `Dataset` and `Batcher`.
///
/// It is burn's `DataLoader`, so `SupervisedTraining` takes it, in an `Arc`. Each call of `iter` is
/// the next epoch, in its own order if the sampler shuffles. Batches come in the order of the
/// sampler, with any number of workers, so the batches of all ranks are one global batch at each
/// step.
///
/// ```
/// use burn::data::dataloader::DataLoader;
/// use burn::data::dataloader::batcher::Batcher;
/// use burn::data::dataset::InMemDataset;
/// use burn::tensor::{Device, Tensor};
/// use burn_dtensor::data::DistributedLoader;
/// use burn_dtensor::prelude::*;
///
/// struct Rows;
///
/// impl Batcher<f32, Tensor<1>> for Rows {
///     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
///         Tensor::from_floats(items.as_slice(), device)
///     }
/// }
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let dataset = InMemDataset::new((0..10).map(|row| row as f32).collect());
///     let sampler = DistributedSampler::new(10, mesh.data_shard("shard")?).with_batch_size(2);
///     let loader = DistributedLoader::new(dataset, sampler, Rows)?.with_device(world.device()).with_num_workers(1);
///     let sums: Vec<f32> = loader.iter().map(|batch| batch.expect("in memory").sum().into_scalar()).collect();
///     assert_eq!(sums, [[1.0, 9.0], [5.0, 13.0]][world.rank()]); // 0 + 1, 4 + 5 and 2 + 3, 6 + 7
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
pub struct DistributedLoader<I, O> {
    source: Source<I, O>,
    sampler: DistributedSampler,
    /// Positions among the rows of this shard in an epoch.
    positions: Range<usize>,
    /// The first epoch, and the number of its batches to leave out.
    start: (usize, usize),
    next_epoch: AtomicUsize,
    num_workers: usize,
    workers: OnceLock<Workers>,
}

/// A batcher of items without padding.
struct WithoutPadding<B>(B);

impl<I, O, B: Batcher<I, O>> Batcher<(I, bool), O> for WithoutPadding<B> {
    fn batch(&self, items: Vec<(I, bool)>, device: &Device) -> O {
        self.0
            .batch(items.into_iter().map(|(item, _)| item).collect(), device)
    }
}

/// The origin of items, and their way into a batch.
struct Source<I, O> {
    dataset: Arc<dyn Dataset<I>>,
    batcher: Arc<dyn Batcher<(I, bool), O>>,
    device: Device,
}

impl<I, O> Clone for Source<I, O> {
    fn clone(&self) -> Self {
        Self {
            dataset: self.dataset.clone(),
            batcher: self.batcher.clone(),
            device: self.device.clone(),
        }
    }
}

/// Local: a loader reads this rank's rows. Every rank creates it, with its own shard.
impl<I: 'static, O: Send + 'static> DistributedLoader<I, O> {
    /// Creates a loader of the rows of `sampler`. The batcher gets the items of each batch.
    ///
    /// # Errors
    /// [`UnseenPadding`](DataError::UnseenPadding) for a sampler with
    /// [`LastBatch::Pad`](super::LastBatch::Pad), [`OtherDataset`](DataError::OtherDataset) if
    /// `sampler` divides another number of rows, and those of [`DistributedSampler::epoch`].
    pub fn new<D, B>(dataset: D, sampler: DistributedSampler, batcher: B) -> Result<Self>
    where
        D: Dataset<I> + 'static,
        B: Batcher<I, O> + 'static,
    {
        if sampler.pads() {
            return Err(DataError::UnseenPadding.into());
        }
        Self::with_padding(dataset, sampler, WithoutPadding(batcher))
    }

    /// Creates a loader whose batcher gets each item together with true if it is padding. Items of
    /// padding repeat rows that count elsewhere, and come last.
    ///
    /// # Errors
    /// As [`new`](Self::new), but any [`LastBatch`](super::LastBatch) is allowed.
    pub fn with_padding<D, B>(dataset: D, sampler: DistributedSampler, batcher: B) -> Result<Self>
    where
        D: Dataset<I> + 'static,
        B: Batcher<(I, bool), O> + 'static,
    {
        let batches = sampler.num_batches()?;
        let batch_size = sampler.batch_size()?;
        if sampler.num_rows() != dataset.len() {
            return Err(DataError::OtherDataset {
                sampler: sampler.num_rows(),
                dataset: dataset.len(),
            }
            .into());
        }
        let source = Source {
            dataset: Arc::new(dataset),
            batcher: Arc::new(batcher),
            device: Device::default(),
        };
        Ok(Self {
            source,
            sampler,
            positions: 0..batches * batch_size,
            start: (0, 0),
            next_epoch: AtomicUsize::new(0),
            num_workers: 0,
            workers: OnceLock::new(),
        })
    }

    /// Creates a loader that leaves padding out, so that each row counts once: the last batch is
    /// shorter on some shards, and missing on others.
    ///
    /// All ranks must still compute it together. burn's `SupervisedTraining` does so, in training and
    /// validation, if `train::supervised` of the feature `train` prepared it. A loop of your own
    /// takes [`with_padding`](Self::with_padding).
    ///
    /// # Errors
    /// As [`with_padding`](Self::with_padding).
    pub fn without_padding<D, B>(
        dataset: D,
        sampler: DistributedSampler,
        batcher: B,
    ) -> Result<Self>
    where
        D: Dataset<I> + 'static,
        B: Batcher<I, O> + 'static,
    {
        let loader = Self::with_padding(dataset, sampler, WithoutPadding(batcher))?;
        // Padding is at the end of a shard's rows.
        let num_real = sampler.epoch(0)?.map(|batch| batch.real_rows().len()).sum();
        Ok(Self {
            positions: 0..num_real,
            ..loader
        })
    }

    /// Sets the device that the batcher gets. Default: burn's default device.
    pub fn with_device(mut self, device: &Device) -> Self {
        self.source.device = device.clone();
        self
    }

    /// Sets the number of threads that prefetch batches. Without any, which is the default, a batch
    /// is loaded when the loop asks for it. A batcher runs on these threads, so it must not
    /// communicate, and not draw from [`random`](crate::dtensor::ops::random).
    ///
    /// The threads serve one iterator at a time: drop one before the next begins. While an earlier
    /// one that has not ended lives, the next waits for ever.
    pub fn with_num_workers(mut self, num_workers: usize) -> Self {
        self.num_workers = num_workers;
        self
    }

    /// Resumes: the first `iter` is epoch `epoch`, counted from 0, without its first `batches`
    /// batches. After `n` complete epochs of a loop of your own it is `with_start(n, 0)`. A
    /// training that `train::supervised` resumes needs no start: it draws the orders of the epochs
    /// before.
    pub fn with_start(mut self, epoch: usize, batches: usize) -> Self {
        (self.start, self.next_epoch) = ((epoch, batches), AtomicUsize::new(epoch));
        self
    }

    /// Returns a loader of other rows or for another device, which continues with the same epoch.
    fn derived(&self, device: Device, positions: Range<usize>) -> Arc<dyn DataLoader<O>> {
        Arc::new(Self {
            source: Source {
                device,
                ..self.source.clone()
            },
            sampler: self.sampler,
            positions,
            start: self.start,
            next_epoch: AtomicUsize::new(self.next_epoch.load(Ordering::Relaxed)),
            num_workers: self.num_workers,
            workers: OnceLock::new(),
        })
    }
}

impl<I: 'static, O: Send + 'static> DataLoader<O> for DistributedLoader<I, O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        let epoch = self.next_epoch.fetch_add(1, Ordering::Relaxed);
        let order = self
            .sampler
            .order(epoch)
            .expect("the sampler was checked when the loader was created");
        let skipped = if epoch == self.start.0 {
            self.start.1
        } else {
            0
        };
        let pass = Arc::new(LoaderEpoch {
            source: self.source.clone(),
            order,
            positions: self.positions.clone(),
        });
        let workers = || {
            self.workers
                .get_or_init(|| Workers::start(self.num_workers))
        };
        // One batch is not worth a thread.
        let num_workers = if pass.len() > 1 { self.num_workers } else { 0 };
        // Worker `w` loads batches skipped + w, skipped + w + n, ..; the iterator asks the workers
        // in turn.
        let ready: VecDeque<_> = (0..num_workers)
            .map(|w| pass.clone().load_on(workers(), w, skipped))
            .collect();
        Box::new(Batches {
            ready,
            next: skipped,
            pass,
        })
    }

    fn num_items(&self) -> usize {
        self.positions.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        self.derived(device.clone(), self.positions.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        let Range {
            start: first,
            end: last,
        } = self.positions;
        self.derived(
            self.source.device.clone(),
            (first + start).min(last)..(first + end).min(last),
        )
    }
}

/// One pass through the positions of a loader, in batches.
struct LoaderEpoch<I, O> {
    source: Source<I, O>,
    order: EpochOrder,
    positions: Range<usize>,
}

/// A batch, an error of the dataset, or a panic of the dataset or the batcher.
type WorkerItem<O> = thread::Result<Result<O, DatasetError>>;

impl<I: 'static, O: Send + 'static> LoaderEpoch<I, O> {
    /// Returns the number of batches.
    fn len(&self) -> usize {
        self.positions.len().div_ceil(self.order.batch_size)
    }

    /// Returns the number of items before batch `index`.
    fn items_before(&self, index: usize) -> usize {
        (index * self.order.batch_size).min(self.positions.len())
    }

    fn load(&self, index: usize) -> Result<O, DatasetError> {
        let first = self.positions.start;
        let positions = first + self.items_before(index)..first + self.items_before(index + 1);
        let (rows, num_real) = self.order.rows(positions);
        let items = self.source.dataset.get_many(rows)?;
        let items = items
            .into_iter()
            .enumerate()
            .map(|(at, item)| (item, at >= num_real))
            .collect();
        Ok(self.source.batcher.batch(items, &self.source.device))
    }

    /// Loads batches `skipped + worker`, `skipped + worker + n`, .. of `n` workers on one of them,
    /// until the receiver is dropped.
    fn load_on(
        self: Arc<Self>,
        workers: &Workers,
        worker: usize,
        skipped: usize,
    ) -> Receiver<WorkerItem<O>> {
        let (sender, receiver) = sync_channel(READY);
        let batches = (skipped + worker..self.len()).step_by(workers.count());
        let load = move || {
            for index in batches {
                if sender
                    .send(catch_unwind(AssertUnwindSafe(|| self.load(index))))
                    .is_err()
                {
                    break;
                }
            }
        };
        workers.run(worker, Box::new(load));
        receiver
    }
}

/// Iterator over the batches of one pass.
struct Batches<I, O> {
    pass: Arc<LoaderEpoch<I, O>>,
    /// Index of the next batch.
    next: usize,
    /// Batches of each worker, that of the next batch first. Empty without workers.
    ready: VecDeque<Receiver<WorkerItem<O>>>,
}

impl<I: 'static, O: Send + 'static> Iterator for Batches<I, O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.pass.len() {
            return None;
        }
        let index = self.next;
        self.next += 1;
        let Some(worker) = self.ready.front() else {
            return Some(self.pass.load(index));
        };
        let loaded = worker.recv().expect("a worker sends each of its batches");
        self.ready.rotate_left(1);
        Some(loaded.unwrap_or_else(|panic| resume_unwind(panic)))
    }
}

impl<I: 'static, O: Send + 'static> DataLoaderIterator<O> for Batches<I, O> {
    fn progress(&self) -> Progress {
        Progress::new(
            self.pass.items_before(self.next),
            self.pass.positions.len(),
            Some("items".into()),
        )
    }
}
