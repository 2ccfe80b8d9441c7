//! [`loaders`]: a rank's rows for training and validation.

use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;

use crate::Result;
use crate::data::{DistributedLoader, DistributedSampler, LastBatch};
use crate::mesh::DeviceMesh;

/// A loader for training, and one for validation.
pub type Loaders<O> = (Arc<dyn DataLoader<O>>, Arc<dyn DataLoader<O>>);

/// Returns loaders of this rank's rows for [`supervised`](super::supervised), whose `mesh` they
/// take.
///
/// `batch_size` is the number of rows of a batch over all ranks. The rows for training are shuffled
/// in another order in each epoch, and those that do not fill the last batch are left out. The rows
/// for validation come in order, each once, and those of the last batch are divided evenly. Both
/// have the same batches on any number of ranks. One thread for each loader prefetches. For other
/// settings, create two [`DistributedLoader`]s.
///
/// Local: no communication.
///
/// # Errors
/// [`DataError`](crate::data::DataError) if `batch_size` is not divisible by the number of ranks,
/// or the training set has fewer rows. A validation set that leaves a rank without a row is found
/// when the training begins ([`NoRows`](crate::train::TrainError::NoRows));
/// [`NotAMember`](crate::mesh::MeshError::NotAMember) outside the mesh.
pub fn loaders<I, O, B>(
    mesh: &DeviceMesh,
    batcher: B,
    batch_size: usize,
    seed: u64,
    train: impl Dataset<I> + 'static,
    valid: impl Dataset<I> + 'static,
) -> Result<Loaders<O>>
where
    I: 'static,
    O: Send + 'static,
    B: Batcher<I, O> + Clone + 'static,
{
    let shard = mesh.data_shard(mesh.names().to_vec())?;
    let sampler = |rows| DistributedSampler::new(rows, shard).with_global_batch_size(batch_size);
    let shuffled = sampler(train.len()).with_shuffle(seed);
    let even = sampler(valid.len()).with_last_batch(LastBatch::Even);
    let train = DistributedLoader::new(train, shuffled, batcher.clone())?.with_num_workers(1);
    let valid = DistributedLoader::without_padding(valid, even, batcher)?.with_num_workers(1);
    Ok((Arc::new(train), Arc::new(valid)))
}
