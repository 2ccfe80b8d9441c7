//! [`sync_buffers`]: the same running statistics on all ranks.

use burn::module::Module;

use super::BufferSync;
use super::buffer_owner::{BufferOwner, homes};
use super::unshare::settled;
use super::values::{meta, read, write};
use crate::Result;
use crate::comm::{Call, ReduceOp};
use crate::param::unit::DataParallelGroups;

/// Makes a sharded model's running statistics equal on all ranks that it was sharded over, as its
/// [`BufferSync`] say.
///
/// Call it before [`valid`](Module::valid), before a record is made of the model, and before anything else
/// that looks at running statistics; [`full_model`](crate::fsdp::full_model) does. Of a model that was not
/// sharded, or has no buffers, it does nothing. Ranks that tensor parallelism adds see the same batch and
/// have the same statistics without it.
///
/// The statistics are written in place: the model's clones have them too, but not models that
/// `valid`, `train` or `full_model` has made of it.
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
///     // Each rank's batch is another: all 0 here, all 1 there.
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
/// Every rank that the model was sharded over must call it: one broadcast, or one all-reduce, of all
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

/// Running statistics that were sharded over the same ranks, with one policy.
struct Together {
    data: DataParallelGroups,
    paths: Vec<String>,
}

/// In the order of the model, on every rank the same.
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
