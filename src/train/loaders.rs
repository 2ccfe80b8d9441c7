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
/// in another order in each epoch; those for validation come in order. Each row comes once in an
/// epoch, and the rows of a last, smaller batch are divided evenly, so both splits have the same
/// batches on any number of ranks. Gradients of a batch are averaged over its rows, also if ranks
/// have different numbers of them, or none. One thread for each loader prefetches. For other
/// settings, create two [`DistributedLoader`]s.
///
/// Local: no communication.
///
/// # Errors
/// [`DataError`](crate::data::DataError) if `batch_size` is not divisible by the number of ranks. A
/// set that leaves a rank without a row is found when the training begins
/// ([`NoRows`](crate::train::TrainError::NoRows)); [`NotAMember`](crate::mesh::MeshError::NotAMember) outside the mesh.
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
    let sampler = |rows| {
        DistributedSampler::new(rows, shard)
            .with_global_batch_size(batch_size)
            .with_last_batch(LastBatch::Even)
    };
    let shuffled = sampler(train.len()).with_shuffle(seed);
    let in_order = sampler(valid.len());
    let train = DistributedLoader::without_padding(train, shuffled, batcher.clone())?;
    let valid = DistributedLoader::without_padding(valid, in_order, batcher)?;
    let [train, valid] = [train.with_num_workers(1), valid.with_num_workers(1)];
    Ok((Arc::new(train), Arc::new(valid)))
}
