//! `DistributedLoader` beside the sampler whose rows it loads.

use std::collections::HashSet;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, ThreadId};

use burn::data::dataloader::DataLoader;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError, InMemDataset};
use burn::tensor::Device;
use burn_dtensor::comm::ReduceOp;
use burn_dtensor::data::{DataError, DataShard, DistributedLoader, DistributedSampler, LastBatch};
use burn_dtensor::testing::MeshTest;
use burn_dtensor::{Error, Result};

/// The items of a batch, unchanged.
struct Items;

impl<I: Send + Sync> Batcher<I, Vec<I>> for Items {
    fn batch(&self, items: Vec<I>, _device: &Device) -> Vec<I> {
        items
    }
}

/// Row `i` is item `i`.
fn rows(len: usize) -> InMemDataset<usize> {
    InMemDataset::new((0..len).collect())
}

/// Two shards, global batches of 4 rows: shard 1 has 4 batches of 2 rows in an epoch.
fn sampler() -> DistributedSampler {
    DistributedSampler::new(17, DataShard { index: 1, count: 2 })
        .with_batch_size(2)
        .with_shuffle(8)
}

fn loader(num_workers: usize) -> DistributedLoader<usize, Vec<usize>> {
    DistributedLoader::new(rows(17), sampler(), Items)
        .unwrap()
        .with_num_workers(num_workers)
}

fn expected(epoch: usize) -> Vec<Vec<usize>> {
    sampler()
        .epoch(epoch)
        .unwrap()
        .map(|batch| batch.into_rows())
        .collect()
}

fn batches<O>(loader: &dyn DataLoader<O>) -> Vec<O> {
    loader.iter().map(|batch| batch.unwrap()).collect()
}

#[test]
fn each_iteration_is_the_next_epoch_with_any_number_of_workers() {
    for num_workers in [0, 1, 2, 3, 9] {
        let loader = loader(num_workers);
        assert_eq!(loader.num_items(), 8);
        for epoch in 0..3 {
            assert_eq!(
                batches(&loader),
                expected(epoch),
                "{num_workers} workers, epoch {epoch}"
            );
        }
        let mut iterator = loader.iter();
        for items in [2, 4, 6, 8] {
            iterator.next().unwrap().unwrap();
            let progress = iterator.progress();
            assert_eq!((progress.items_processed, progress.items_total), (items, 8));
        }
        assert!(iterator.next().is_none() && iterator.next().is_none());
    }
}

#[test]
fn a_resumed_loader_has_the_batches_that_are_left() {
    for num_workers in [0, 3] {
        let loader = loader(num_workers).with_start(2, 3);
        let mut iterator = loader.iter();
        assert_eq!(iterator.next().unwrap().unwrap(), expected(2)[3]);
        assert!(iterator.progress().is_completed() && iterator.next().is_none());
        drop(iterator);
        assert_eq!(batches(&loader), expected(3));
        assert_eq!(batches(&loader), expected(4));
    }
}

/// burn's `SupervisedTraining` moves its loaders to the model's device.
#[test]
fn a_resumed_loader_stays_resumed_on_another_device_and_as_a_slice() {
    for num_workers in [0, 3] {
        let loader = loader(num_workers).with_start(2, 3);
        for derived in [loader.to_device(&Device::flex()), loader.slice(0, 8)] {
            assert_eq!(batches(&*derived), expected(2)[3..]);
            assert_eq!(batches(&*derived), expected(3));
        }
    }
}

#[test]
fn an_iteration_that_is_given_up_is_an_epoch() {
    let loader = loader(2);
    assert_eq!(loader.iter().next().unwrap().unwrap(), expected(0)[0]);
    drop(loader.iter());
    assert_eq!(batches(&loader), expected(2));
}

/// A batch is the device that the batcher gets.
struct OnDevice;

impl Batcher<usize, Device> for OnDevice {
    fn batch(&self, _items: Vec<usize>, device: &Device) -> Device {
        device.clone()
    }
}

#[test]
fn a_batcher_gets_the_device_of_the_loader() {
    for num_workers in [0, 2] {
        let loader = DistributedLoader::new(rows(17), sampler(), OnDevice)
            .unwrap()
            .with_device(&Device::flex().autodiff())
            .with_num_workers(num_workers);
        assert!(
            batches(&loader)
                .into_iter()
                .all(|device| device.is_autodiff())
        );
    }
}

#[test]
fn loaders_of_another_device_and_of_some_rows_continue() {
    let moved = DistributedLoader::new(rows(17), sampler(), OnDevice)
        .unwrap()
        .to_device(&Device::flex().autodiff());
    assert!(
        batches(&*moved)
            .into_iter()
            .all(|device| device.is_autodiff())
    );

    for num_workers in [0, 2] {
        let loader = loader(num_workers);
        batches(&loader);
        let moved = loader.to_device(&Device::flex());
        assert_eq!(
            [batches(&*moved), batches(&*moved)],
            [expected(1), expected(2)]
        );
        // Positions 1..6 of the rows of an epoch, in batches of two; of these 1..4; of these those
        // that exist.
        let of_epoch: Vec<usize> = expected(1).concat();
        let chunks = |rows: &[usize]| rows.chunks(2).map(<[_]>::to_vec).collect::<Vec<_>>();
        let sliced = loader.slice(1, 6);
        let again = sliced.slice(1, 4);
        assert_eq!(
            (
                sliced.num_items(),
                again.num_items(),
                again.slice(2, 9).num_items()
            ),
            (5, 3, 1)
        );
        assert_eq!(batches(&*sliced), chunks(&of_epoch[1..6]));
        assert_eq!(batches(&*again), chunks(&of_epoch[2..5]));
    }
}

/// burn's `SupervisedTraining` moves its loaders to the model's device.
#[test]
fn a_moved_loader_prefetches_on_as_many_threads() {
    struct Threads;
    impl Batcher<usize, ThreadId> for Threads {
        fn batch(&self, _items: Vec<usize>, _device: &Device) -> ThreadId {
            thread::current().id()
        }
    }
    for num_workers in [1, 2, 3] {
        let loader = DistributedLoader::new(rows(17), sampler(), Threads)
            .unwrap()
            .with_num_workers(num_workers);
        for derived in [loader.to_device(&Device::flex()), loader.slice(0, 8)] {
            let threads: HashSet<_> = batches(&*derived).into_iter().collect();
            assert_eq!(threads.len(), num_workers);
            assert!(!threads.contains(&thread::current().id()));
        }
    }
}

#[test]
fn a_batcher_that_does_not_see_padding_gets_none() {
    let padded = sampler().with_last_batch(LastBatch::Pad);
    let error = |loader: Result<DistributedLoader<usize, Vec<usize>>>| match loader.err() {
        Some(Error::Data(error)) => error,
        _ => panic!("no error of the data"),
    };
    assert_eq!(
        error(DistributedLoader::new(rows(17), padded, Items)),
        DataError::UnseenPadding
    );
    let other = error(DistributedLoader::new(rows(18), sampler(), Items));
    assert_eq!(
        other,
        DataError::OtherDataset {
            sampler: 17,
            dataset: 18
        }
    );
    let empty = DistributedSampler::new(0, DataShard::ALL);
    assert_eq!(
        error(DistributedLoader::new(rows(0), empty, Items)),
        DataError::EmptyDataset
    );

    let loader = DistributedLoader::with_padding(rows(17), padded, Items).unwrap();
    let expected = padded.epoch(0).unwrap().map(|batch| {
        let is_padding = batch.is_padding();
        batch
            .into_rows()
            .into_iter()
            .zip(is_padding)
            .collect::<Vec<_>>()
    });
    assert_eq!(batches(&loader), expected.collect::<Vec<_>>());
}

/// Rows of which one cannot be read, and one makes its reader panic.
struct Faulty;

impl Dataset<usize> for Faulty {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        match index {
            2 => Err(DatasetError::new(io::Error::other("row 2 is torn"))),
            5 => panic!("row 5 is mad"),
            _ => Ok(index),
        }
    }

    fn len(&self) -> usize {
        8
    }
}

#[test]
fn faults_of_the_dataset_come_to_the_loop_at_their_batch() {
    for num_workers in [0, 1, 2] {
        let sampler = DistributedSampler::new(8, DataShard::ALL).with_batch_size(2);
        let loader = DistributedLoader::new(Faulty, sampler, Items)
            .unwrap()
            .with_num_workers(num_workers);
        let mut iterator = loader.iter();
        assert_eq!(iterator.next().unwrap().unwrap(), [0, 1]);
        assert_eq!(
            iterator.next().unwrap().unwrap_err().to_string(),
            "row 2 is torn"
        );
        let panic = catch_unwind(AssertUnwindSafe(|| iterator.next())).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"row 5 is mad"));
        assert_eq!(iterator.next().unwrap().unwrap(), [6, 7]);
        assert!(iterator.next().is_none());
    }
}

/// The mean over all rows of an uneven dataset, on ranks of which the last has nothing but padding
/// in the last batch.
#[test]
fn an_evaluation_counts_each_row_once() {
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let sampler = DistributedSampler::new(7, mesh.data_shard("shard")?).with_batch_size(1);
        let dataset: Arc<dyn Dataset<usize>> = Arc::new(rows(7));
        let loader = DistributedLoader::with_padding(
            dataset,
            sampler.with_last_batch(LastBatch::Pad),
            Items,
        )?;
        let (mut sum, mut count, mut steps) = (0, 0, 0);
        for batch in loader.iter() {
            let real = batch
                .expect("in memory")
                .into_iter()
                .filter(|(_, is_padding)| !is_padding);
            real.for_each(|(row, _)| (sum, count) = (sum + row * row, count + 1));
            steps += 1;
        }
        let all = |value: usize| mesh.all_reduce(value as f64, ReduceOp::Sum);
        assert_eq!(
            (steps, all(sum)?, all(count)?),
            (3, f64::from(1 + 4 + 9 + 16 + 25 + 36), 7.0)
        );
        Ok(())
    });
}
