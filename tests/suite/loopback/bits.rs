//! Results of ranks in processes are bit-identical to those of ranks as threads.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::backend::ReceivedTensors;
use burn_dtensor::comm::{Launch, ProcessJob, ReduceOp, ShardedTensor, TensorMeta, World, launch};
use burn_dtensor::fsdp::unit;
use burn_dtensor::fsdp::{FullyShard, full_model, fully_shard};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::testing::LoopbackJob;

use super::read;

/// Runs `program` in worlds of four ranks, as threads and in 1, 2 and 4 processes, and compares the
/// results.
fn everywhere<T: Send + std::fmt::Debug + PartialEq>(program: impl Fn(&World) -> Result<T> + Sync) {
    let expected = launch(Launch::threads(4), &program).unwrap_or_else(|error| panic!("{error}"));
    let jobs = [
        (LoopbackJob::new(1, 11), 4),
        (LoopbackJob::new(2, 11), 2),
        (LoopbackJob::new(4, 11), 1),
    ];
    for (job, each) in jobs {
        let run = |_, processes: &ProcessJob| {
            launch(Launch::on_backend(processes.backend(each)), &program)
        };
        let got = job
            .run(run)
            .into_iter()
            .flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")));
        assert_eq!(
            got.collect::<Vec<_>>(),
            expected,
            "{} processes of {each}",
            job.processes()
        );
    }
}

/// Returns values of many magnitudes, whose floating-point sum depends on the order of addition.
pub(super) fn values(rank: usize, len: usize) -> Vec<f32> {
    let value = |i| {
        ((i * 7919 + rank * 104_729) % 1013) as f32 / (1 << ((i + 3 * rank) % 11)) as f32 - 40.0
    };
    // The remaining values repeat this period.
    let period = (0..1013 * 11).map(value).collect::<Vec<_>>();
    let mut values = period.repeat(len.div_ceil(period.len()));
    values.truncate(len);
    values
}

#[test]
fn reductions_are_those_of_threads_to_the_bit() {
    everywhere(|world| {
        let mut got = Vec::new();
        let values = TensorData::new(values(world.rank(), 130 * 2900), [130, 2900]);
        let cast = |dtype| {
            Tensor::<2>::from_data(values.clone(), world.device())
                .cast(dtype)
                .into_data()
        };
        let casts = [DType::F32, DType::F16, DType::BF16].map(|dtype| (dtype, cast(dtype)));
        let comms = [
            world.all(),
            world.group(&[2, 0, 3, 1])?,
            world.subgroup([vec![0, 2, 3], vec![1]])?.unwrap(),
        ];
        for (at, comm) in comms.iter().enumerate() {
            for (of, (dtype, data)) in casts.iter().enumerate() {
                for (which, op) in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::premul_sum(0.3)]
                    .into_iter()
                    .enumerate()
                {
                    // Without `LONG_TESTS`, each dtype and operation is tried in only one of the
                    // groups.
                    if std::env::var_os("LONG_TESTS").is_none()
                        && !(at + of + which).is_multiple_of(3)
                    {
                        continue;
                    }
                    // Large enough that the ranks of a process share the work, and that an
                    // all-reduce between processes has two phases.
                    let tensor = || {
                        Tensor::<2>::from_data(data.clone(), (world.device(), *dtype))
                            .into_dispatch()
                    };
                    let empty = Tensor::<2>::empty([0, 3], world.device()).into_dispatch();
                    got.extend(
                        comm.all_reduce("full".into(), vec![empty, tensor()], op)
                            .wait()?,
                    );
                    let shard = |dim: usize| ShardedTensor {
                        tensor: tensor(),
                        dim,
                        sizes: ShardSizes::Chunked(130 + 2770 * dim),
                    };
                    got.extend(
                        comm.reduce_scatter("shards".into(), vec![shard(0), shard(1)], op)
                            .wait()?,
                    );
                }
            }
        }
        Ok(got
            .into_iter()
            .map(read)
            .map(|data| data.as_bytes().to_vec())
            .collect::<Vec<_>>())
    });
}

/// The ranks shard all-reduces of several tensors, with shards of uneven length. The test waits for
/// some, leaves one to the completion thread, drops one, and has two in flight at once.
#[test]
fn large_all_reduces_are_those_of_threads() {
    everywhere(|world| {
        let given = |seed: usize, dtype: DType, shape: [usize; 2]| {
            let data = TensorData::new(values(world.rank() + seed, shape.iter().product()), shape);
            Tensor::<2>::from_data(data, world.device())
                .cast(dtype)
                .into_dispatch()
        };
        let large = |seed| given(seed, DType::F32, [7, 300_001]);
        let call = |op| {
            let tensors = vec![
                large(1),
                given(2, DType::F32, [0, 3]),
                given(3, DType::BF16, [1, 1_000_003]),
                large(5),
            ];
            world.all().all_reduce("large".into(), tensors, op)
        };
        drop(call(ReduceOp::Max));
        let (first, second) = (call(ReduceOp::Avg), call(ReduceOp::Sum));
        let mut got = second.wait()?;
        got.extend(first.wait()?);
        let left = call(ReduceOp::Sum);
        while !left.is_complete() {
            std::thread::yield_now();
        }
        got.extend(left.wait()?);
        // This reduction uses burn's operations.
        got.extend(call(ReduceOp::premul_sum(0.5)).wait()?);
        world.barrier("all have their results")?;
        Ok(got
            .into_iter()
            .map(read)
            .map(|data| data.as_bytes().to_vec())
            .collect::<Vec<_>>())
    });
}

/// Gathers shards that are large enough to be received in place, contiguous ones and others.
#[test]
fn gathers_of_large_parts_are_those_of_threads() {
    everywhere(|world| {
        let mut got = Vec::new();
        for comm in [
            world.all(),
            world.group(&[2, 0, 3, 1])?,
            world.subgroup([vec![0, 2, 3], vec![1]])?.unwrap(),
        ] {
            let (ranks, rank) = (comm.group().size(), comm.group().rank());
            let lengths: Vec<usize> = (0..ranks).map(|rank| [400, 0, 1, 333][rank]).collect();
            let shard = |before: usize, sizes: ShardSizes, inner: usize, dtype: DType| {
                let shape = [before, sizes.range(ranks, rank).len(), inner];
                let data = TensorData::new(values(world.rank(), shape.iter().product()), shape);
                let tensor = Tensor::<3>::from_data(data, world.device())
                    .cast(dtype)
                    .into_dispatch();
                ShardedTensor {
                    tensor,
                    dim: 1,
                    sizes,
                }
            };
            let even = || shard(1, ShardSizes::Chunked(400), 180, DType::F32);
            let uneven = || {
                shard(
                    1,
                    ShardSizes::Uneven(lengths.clone().into()),
                    180,
                    DType::BF16,
                )
            };
            let fragments = || shard(3, ShardSizes::Chunked(401), 60, DType::F32);
            drop(comm.all_gather("dropped".into(), vec![even()]));
            for shards in [
                vec![even()],
                vec![uneven(), even()],
                vec![even(), fragments()],
            ] {
                got.extend(comm.all_gather("large".into(), shards).wait()?);
            }
        }
        Ok(got
            .into_iter()
            .map(read)
            .map(|data| data.as_bytes().to_vec())
            .collect::<Vec<_>>())
    });
}

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Linear>,
    head: Linear,
}

impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, |net, mut x| {
            for block in &net.blocks {
                x = unit(block, x, |block, x| block.forward(x).tanh());
            }
            net.head.forward(x)
        })
    }
}

/// Trains on meshes of replicas and shards. Each mesh dimension is within processes, across
/// processes, or both.
#[test]
fn a_sharded_model_trains_to_the_bits_of_threads() {
    for (shape, names) in [
        ([2, 2], ["replicate", "shard"]),
        ([1, 4], ["replicate", "shard"]),
    ] {
        everywhere(|world| {
            let mesh = DeviceMesh::new(world, shape, names)?;
            let device = world.device().clone().autodiff();
            let param = |shape: [usize; 2], seed| {
                let data = TensorData::new(values(seed, shape[0] * shape[1]), shape);
                Param::from_tensor(Tensor::from_data(data, &device) * 0.01)
            };
            let linear = |outputs: usize, seed| {
                let bias = Param::from_tensor(Tensor::ones([outputs], &device));
                Linear {
                    weight: param([16, outputs], seed),
                    bias: Some(bias),
                }
            };
            let net = Net {
                blocks: (0..2).map(|seed| linear(16, seed)).collect(),
                head: linear(3, 2),
            };
            let mut net = fully_shard(net, &mesh, FullyShard::new().with_units(["blocks.*"]))?;
            let mut optim = AdamWConfig::new().init();
            let mut losses = Vec::new();
            for step in 0..4 {
                let x = TensorData::new(values(4 * step + world.rank(), 8 * 16), [8, 16]);
                let loss = (net.forward(Tensor::from_data(x, &device) * 0.01) - 1.0)
                    .square()
                    .mean();
                losses.push(loss.clone().into_scalar::<f32>().to_bits());
                let grads = GradientsParams::from_grads(loss.backward(), &net);
                net = optim.step(1e-2, net, grads);
            }
            let full = full_model(&net)?;
            Ok((
                losses,
                full.head.weight.val().into_data(),
                full.blocks[1].weight.val().into_data(),
            ))
        });
    }
}

/// A header may arrive before its data, and a rank that calls later than others must nevertheless
/// continue. A rank must not see writes of other ranks to their results either.
#[test]
fn all_reduces_in_two_phases_follow_each_other() {
    let job = LoopbackJob::new(3, 20);
    let ends = job.run(|_, processes| {
        launch(Launch::on_backend(processes.backend(1)), |world| {
            let tensor = || {
                Tensor::<1>::full([300_000], world.rank() as f32, world.device()).into_dispatch()
            };
            for call in 0..100 {
                let sum = world
                    .all()
                    .all_reduce("sum".into(), vec![tensor()], ReduceOp::Sum)
                    .wait()?
                    .remove(0);
                let changed = Tensor::<1>::from_dispatch(sum).mul_scalar(7.0);
                assert_eq!(
                    changed.sum().into_scalar::<f32>(),
                    6_300_000.0,
                    "call {call}"
                );
            }
            Ok(())
        })
    });
    ends.into_iter().for_each(|end| drop(end.unwrap()));
}

/// A rank that does not wait for an operation must still send its data. Ranks that wait in another
/// order get the correct results.
#[test]
fn all_reduces_in_two_phases_are_waited_for_in_any_order_or_not_at_all() {
    everywhere(|world| {
        let comm = world.all();
        let reduce = |call: usize| {
            let data = TensorData::new(values(world.rank() + call, 300_000), [300_000]);
            let tensor = Tensor::<1>::from_data(data, world.device()).into_dispatch();
            comm.all_reduce("sum".into(), vec![tensor], ReduceOp::Sum)
        };
        let mut works: Vec<_> = (0..5).map(|call| (call, reduce(call))).collect();
        match world.rank() {
            0 => works.reverse(),
            1 => drop(works.drain(..)),
            2 => drop(works.drain(1..4)),
            _ => {}
        }
        let mut got = Vec::new();
        for (call, work) in works {
            got.push((call, read(work.wait()?.remove(0)).as_bytes().to_vec()));
        }
        world.barrier("all have their results")?;
        Ok(got)
    });
}

/// If a process has only one rank, a tensor received from another process has a unique handle, so
/// burn writes it in place. Ranks of one process may share memory; a write then goes to a copy.
#[test]
fn no_rank_sees_what_another_writes() {
    for (processes, each) in [(2, 1), (2, 2)] {
        let job = LoopbackJob::new(processes, 20);
        job.run(|_, processes| {
            let ends = launch(Launch::on_backend(processes.backend(each)), |world| {
                let (comm, size) = (world.all(), world.size());
                let tensor =
                    || Tensor::<1>::full([8], world.rank() as f32, world.device()).into_dispatch();
                let meta = TensorMeta {
                    shape: [8].into(),
                    dtype: DType::F32,
                };
                let root = (world.rank() == 0).then(|| vec![tensor()]);
                let got = comm
                    .broadcast("".into(), root, vec![meta.clone()], 0)
                    .wait()?;
                // All ranks of a process share this tensor.
                let mut got: Vec<_> = got.into_iter().map(|tensor| (each == 1, tensor)).collect();
                let (parts, metas) = (vec![Some(tensor()); size], vec![Some(meta); size]);
                let own = world.rank();
                let parts = comm
                    .all_to_all_list("".into(), parts, metas)
                    .wait()?
                    .into_iter()
                    .flatten()
                    .enumerate();
                let is_elsewhere = |rank: usize| rank / each != own / each;
                got.extend(
                    parts
                        .filter(|(rank, _)| *rank != own)
                        .map(|(rank, part)| (is_elsewhere(rank), part)),
                );
                comm.send("".into(), vec![tensor()], (own + 1) % size, 0)
                    .wait()?;
                let ReceivedTensors { from, tensors } =
                    comm.receive("".into(), None, None, 0).wait()?;
                got.extend(
                    tensors
                        .into_iter()
                        .map(|tensor| (is_elsewhere(from), tensor)),
                );
                world.barrier("no rank reads these tensors any more")?;
                for (is_own, tensor) in got {
                    let tensor = Tensor::<1>::from_dispatch(tensor);
                    assert!(
                        !is_own || tensor.can_mut(),
                        "a received tensor has a unique handle"
                    );
                    let (before, value) = (tensor.clone().into_data(), world.rank() as f32 + 0.5);
                    let written = tensor * 0.0 + value;
                    world.barrier("all have written")?;
                    assert_ne!(before, written.clone().into_data());
                    assert_eq!(written.into_data(), TensorData::new(vec![value; 8], [8]));
                }
                Ok(())
            });
            ends.unwrap_or_else(|error| panic!("{error}"));
        });
    }
}
