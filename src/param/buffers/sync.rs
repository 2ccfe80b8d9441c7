//! [`sync_buffers`]: makes running statistics equal on all ranks, according to a [`BufferSync`].

use burn::module::Module;

use super::buffer_owner::{BufferOwner, homes};
use super::unshare::settled;
use super::values::{meta, read, write};
use crate::Result;
use crate::comm::{Call, ReduceOp};
use crate::param::unit::DataParallelGroups;

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

/// Makes a sharded model's running statistics equal on all ranks over which it was sharded, according to its
/// [`BufferSync`].
///
/// Call it before [`valid`](Module::valid), before you make a record of the model, and before other code reads
/// running statistics. [`full_model`](crate::fsdp::full_model) calls it. It does nothing for a model that was not
/// sharded or has no buffers. Ranks that differ only along a tensor-parallel dimension compute on the same batch,
/// so their statistics are equal anyway.
///
/// The statistics are written in place. The model's clones see them, but models that `valid`, `train` or
/// `full_model` made from it before do not.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{BatchNorm, BatchNormConfig};
/// use burn::tensor::Tensor;
/// use burn_dtensor::prelude::*;
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let device = world.device().clone().autodiff();
///     let norm: BatchNorm = BatchNormConfig::new(3).init(&device);
///     let norm = fully_shard(norm, &mesh, FullyShard::new().with_buffer_sync(BufferSync::Average))?;
///     // The ranks have different batches: all 0 on rank 0, all 1 on rank 1.
///     norm.forward(Tensor::<2>::full([4, 3], world.rank() as f32, &device));
///     sync_buffers(&norm)?;
///     let mean = norm.valid().running_mean.value();
///     assert_eq!(mean.into_data().try_to_vec::<f32>().unwrap(), [0.05; 3]); // momentum 0.1, of 0 and 1
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<_, LaunchError>(())
/// ```
///
/// # Collective
/// Every rank over which the model was sharded must call it. It runs one broadcast, or one all-reduce, of all
/// statistics.
///
/// # Errors
/// [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn sync_buffers<M: Module>(model: &M) -> Result<()> {
    let settled = settled(model);
    for Together { data, paths } in together(homes(&settled)) {
        let values = read(&settled, &paths, true);
        let call = Call { model: Some(data.model_of_all()), ..Call::new("sync_buffers") };
        let values = match data.buffer_sync {
            BufferSync::FirstRank => {
                let (first, metas) = (data.all.group().rank() == 0, values.iter().map(meta).collect());
                data.all.broadcast(call, first.then_some(values), metas, 0).wait()?
            }
            BufferSync::Average => data.all.all_reduce(call, values, ReduceOp::Avg).wait()?,
        };
        // The clone shares its running statistics with the model.
        write(model.clone(), paths, values);
    }
    Ok(())
}

/// Running statistics that were sharded over the same ranks and have the same policy.
struct Together {
    data: DataParallelGroups,
    paths: Vec<String>,
}

/// Groups the buffers, in the order of the model, which is the same on every rank.
fn together(homes: Vec<BufferOwner>) -> Vec<Together> {
    let mut all: Vec<Together> = Vec::new();
    for BufferOwner { path, param, .. } in homes.into_iter().filter(|home| home.running) {
        let Some(data) = &param.unit.data else { continue };
        let same =
            |other: &DataParallelGroups| other.all.group() == data.all.group() && other.buffer_sync == data.buffer_sync;
        match all.iter_mut().find(|together| same(&together.data)) {
            Some(together) => together.paths.push(path),
            None => all.push(Together { data: data.clone(), paths: vec![path] }),
        }
    }
    all
}
