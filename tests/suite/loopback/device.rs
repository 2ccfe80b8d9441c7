//! Tensors of other devices, which are sent through host memory.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::{Call, Launch, ProcessJob, ReduceOp, ShardedTensor, TensorMeta, World, launch};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::testing::LoopbackJob;
use burn_dtensor::testing::gpu;

use super::read;

/// Returns this rank's results of all kinds of collectives.
fn program(world: &World) -> Result<Vec<TensorData>> {
    let (comm, rank, size) = (world.all(), world.rank(), world.size());
    let tensor = |rows: usize| {
        let data = TensorData::new((0..rows * 6).map(|i| (i * 7 + rank * 5) as f32 / 3.0).collect(), [rows, 6]);
        Tensor::<2>::from_data(data, world.device()).into_dispatch()
    };
    let shard = |rows: usize, dim: usize| {
        let len = if dim == 0 { 4 * size } else { 6 };
        ShardedTensor { tensor: tensor(rows), dim, sizes: ShardSizes::Chunked(len) }
    };
    let meta = TensorMeta { shape: [4, 6].into(), dtype: DType::F32 };
    let mut got = comm.all_gather(Call::new("gather"), vec![shard(4, 0), shard(4, 0)]).wait()?;
    got.extend(comm.reduce_scatter("rows".into(), vec![shard(4 * size, 0)], ReduceOp::Sum).wait()?);
    got.extend(comm.reduce_scatter("columns".into(), vec![shard(4 * size, 1); 2], ReduceOp::Avg).wait()?);
    got.extend(comm.all_reduce("all".into(), vec![tensor(4)], ReduceOp::Sum).wait()?);
    got.push(comm.all_to_all("reshard".into(), shard(4, 0), 1, ShardSizes::Chunked(6)).wait()?);
    let root = (rank == 1).then(|| vec![tensor(4)]);
    got.extend(comm.broadcast("root".into(), root.clone(), vec![meta.clone()], 1).wait()?);
    got.extend(comm.scatter("shards".into(), root, vec![meta.clone()], vec![(1, ShardSizes::Chunked(6))], 1).wait()?);
    let (parts, metas) = (vec![Some(tensor(4)); size], vec![Some(meta); size]);
    got.extend(comm.all_to_all_list("list".into(), parts, metas).wait()?.into_iter().flatten());
    comm.send("message".into(), vec![tensor(3)], (rank + 1) % size, 0).wait()?;
    got.extend(comm.receive("message".into(), None, None, 0).wait()?.tensors);
    let home = world.device().as_dispatch();
    assert!(got.iter().all(|tensor| tensor.device() == *home), "results are on the rank's device");
    Ok(got.into_iter().map(read).collect())
}

#[test]
fn collectives_of_another_device_are_those_of_threads() {
    let device = gpu();
    let expected =
        launch(Launch::threads(4).with_device(device.clone()), program).unwrap_or_else(|error| panic!("{error}"));
    for (processes, each) in [(2, 2), (4, 1)] {
        let job = LoopbackJob::new(processes, 22);
        let run = |_, processes: &ProcessJob| {
            launch(Launch::on_backend(processes.engine(each)).with_device(device.clone()), program)
        };
        let got = job.run(run).into_iter().flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")));
        assert_eq!(got.collect::<Vec<_>>(), expected, "{processes} processes of {each}");
    }
}
