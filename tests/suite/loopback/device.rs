//! Tensors of other devices, which are sent through host memory.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::{
    Call, Launch, PackStats, ProcessJob, ReduceOp, ShardedTensor, TensorMeta, World, launch,
};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::testing::LoopbackJob;
use burn_dtensor::testing::gpu;

use super::read;

/// Returns this rank's results of all kinds of collectives.
fn program(world: &World) -> Result<Vec<TensorData>> {
    let (comm, rank, size) = (world.all(), world.rank(), world.size());
    let tensor = |rows: usize| {
        let data = TensorData::new(
            (0..rows * 6)
                .map(|i| (i * 7 + rank * 5) as f32 / 3.0)
                .collect(),
            [rows, 6],
        );
        Tensor::<2>::from_data(data, world.device()).into_dispatch()
    };
    let shard = |rows: usize, dim: usize| {
        let len = if dim == 0 { 4 * size } else { 6 };
        ShardedTensor {
            tensor: tensor(rows),
            dim,
            sizes: ShardSizes::Chunked(len),
        }
    };
    let meta = TensorMeta {
        shape: [4, 6].into(),
        dtype: DType::F32,
    };
    let mut got = comm
        .all_gather(Call::new("gather"), vec![shard(4, 0), shard(4, 0)])
        .wait()?;
    got.extend(
        comm.reduce_scatter("rows".into(), vec![shard(4 * size, 0)], ReduceOp::Sum)
            .wait()?,
    );
    got.extend(
        comm.reduce_scatter("columns".into(), vec![shard(4 * size, 1); 2], ReduceOp::Avg)
            .wait()?,
    );
    got.extend(
        comm.all_reduce("all".into(), vec![tensor(4)], ReduceOp::Sum)
            .wait()?,
    );
    got.push(
        comm.all_to_all("reshard".into(), shard(4, 0), 1, ShardSizes::Chunked(6))
            .wait()?,
    );
    let root = (rank == 1).then(|| vec![tensor(4)]);
    got.extend(
        comm.broadcast("root".into(), root.clone(), vec![meta.clone()], 1)
            .wait()?,
    );
    got.extend(
        comm.scatter(
            "shards".into(),
            root,
            vec![meta.clone()],
            vec![(1, ShardSizes::Chunked(6))],
            1,
        )
        .wait()?,
    );
    let (parts, metas) = (vec![Some(tensor(4)); size], vec![Some(meta); size]);
    got.extend(
        comm.all_to_all_list("list".into(), parts, metas)
            .wait()?
            .into_iter()
            .flatten(),
    );
    comm.send("message".into(), vec![tensor(3)], (rank + 1) % size, 0)
        .wait()?;
    got.extend(
        comm.receive("message".into(), None, None, 0)
            .wait()?
            .tensors,
    );
    let home = world.device().as_dispatch();
    assert!(
        got.iter().all(|tensor| tensor.device() == *home),
        "results are on the rank's device"
    );
    Ok(got.into_iter().map(read).collect())
}

#[test]
fn collectives_of_another_device_are_those_of_threads() {
    let device = gpu();
    let expected = launch(Launch::threads(4).with_device(device.clone()), program)
        .unwrap_or_else(|error| panic!("{error}"));
    for (processes, each) in [(2, 2), (4, 1)] {
        let job = LoopbackJob::new(processes, 22);
        let run = |_, processes: &ProcessJob| {
            launch(
                Launch::on_backend(processes.backend(each)).with_device(device.clone()),
                program,
            )
        };
        let got = job
            .run(run)
            .into_iter()
            .flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")));
        assert_eq!(
            got.collect::<Vec<_>>(),
            expected,
            "{processes} processes of {each}"
        );
    }
}

/// Ranks of other processes contribute host tensors, so the kernels that pack a list for the ranks
/// of a device would run for nothing, and fill memory.
#[test]
fn lists_for_other_processes_are_not_packed() {
    for (processes, each) in [(2, 1), (2, 2)] {
        let (job, device) = (LoopbackJob::new(processes, 23), gpu());
        let run = |_, processes: &ProcessJob| {
            launch(
                Launch::on_backend(processes.backend(each)).with_device(device.clone()),
                |world| {
                    let (comm, size) = (world.all(), world.size());
                    let list = |rows: usize| {
                        let value = world.rank() as f32 + 1.0;
                        [1, 2].map(|columns| {
                            let tensor = Tensor::<2>::full([rows, columns], value, world.device())
                                .into_dispatch();
                            ShardedTensor {
                                tensor,
                                dim: 0,
                                sizes: ShardSizes::Chunked(2 * size),
                            }
                        })
                    };
                    let mut got = comm.all_gather("gather".into(), list(2).to_vec()).wait()?;
                    got.extend(
                        comm.reduce_scatter("sum".into(), list(2 * size).to_vec(), ReduceOp::Sum)
                            .wait()?,
                    );
                    let got = got
                        .into_iter()
                        .map(|tensor| read(tensor).iter::<f32>().collect::<Vec<_>>());
                    Ok((got.collect::<Vec<_>>(), world.ledger().copied()))
                },
            )
        };
        let ranks = processes * each;
        let gathered = |columns: usize| {
            (1..=ranks)
                .flat_map(|value| vec![value as f32; 2 * columns])
                .collect::<Vec<_>>()
        };
        let sums = |columns: usize| vec![(1..=ranks).sum::<usize>() as f32; 2 * columns];
        for (rank, (got, copied)) in job
            .run(run)
            .into_iter()
            .flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")))
        {
            assert_eq!(
                got,
                [gathered(1), gathered(2), sums(1), sums(2)],
                "rank {rank}"
            );
            assert_eq!(copied, PackStats::default(), "rank {rank}");
        }
    }
}
