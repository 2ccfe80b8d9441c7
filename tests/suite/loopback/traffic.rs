//! Bytes sent to other processes: no more than necessary, and of deferred calls none before they
//! are needed.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Distribution, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Call, Launch, ReduceOp, ShardedTensor, TensorMeta, Work, World, launch};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::testing::LoopbackJob;

/// Returns the number of bytes that this process sends during `work`. Every rank reads the counter
/// between two barriers of its process, so that no rank of the process sends at that moment.
fn sent(job: &LoopbackJob, world: &World, work: impl FnOnce() -> Result<()>) -> Result<u64> {
    let each = world.size() / job.processes();
    let process = world.rank() / each;
    let within = world.group(&(process * each..(process + 1) * each).collect::<Vec<_>>())?;
    world.barrier("all ranks have started")?;
    within
        .barrier("both ranks of this process have started".into())
        .wait()?;
    let before = job.sent(process);
    within.barrier("both have read the counter".into()).wait()?;
    work()?;
    within.barrier("both have finished".into()).wait()?;
    let after = job.sent(process);
    within
        .barrier("both have read the counter again".into())
        .wait()?;
    Ok(after - before)
}

#[test]
fn a_mesh_dimension_inside_a_process_sends_nothing() {
    let job = LoopbackJob::new(2, 12);
    let ends = job.run(|_, processes| {
        launch(Launch::on_backend(processes.backend(2)), |world| {
            let mesh = DeviceMesh::new(world, [2, 2], ["across", "inside"])?;
            let all = |dim: usize| {
                let comm = mesh.communicator(dim)?;
                let tensor = Tensor::<1>::random([64], Distribution::Default, world.device())
                    .into_dispatch();
                comm.all_reduce("sum".into(), vec![tensor.clone()], ReduceOp::Sum)
                    .wait()?;
                let shard = || ShardedTensor {
                    tensor: tensor.clone(),
                    dim: 0,
                    sizes: ShardSizes::Chunked(128),
                };
                comm.all_gather("gather".into(), vec![shard()]).wait()?;
                comm.barrier("barrier".into()).wait()?;
                comm.send(
                    "to".into(),
                    vec![tensor.clone()],
                    1 - comm.group().rank(),
                    0,
                )
                .wait()?;
                comm.receive("to".into(), None, None, 0).wait()?;
                Ok(())
            };
            Ok((sent(&job, world, || all(1))?, sent(&job, world, || all(0))?))
        })
    });
    for (_, (inside, across)) in ends.into_iter().flat_map(|end| end.unwrap()) {
        assert_eq!(inside, 0);
        // Two ranks send an operand, a shard and a message of 256 bytes each.
        assert!((6 * 256..6 * 256 + 1000).contains(&across), "{across}");
    }
}

/// Compares the payload bytes that each process sends of a tensor of 4 x 256 floats, with two ranks
/// in each of two processes.
#[test]
fn the_other_process_gets_what_its_ranks_need_and_once() {
    const FLOATS: usize = 4 * 256;
    let job = LoopbackJob::new(2, 13);
    let ends = job.run(|_, processes| {
        launch(Launch::on_backend(processes.backend(2)), |world| {
            let (comm, shard_sizes) = (world.all(), ShardSizes::Chunked(FLOATS));
            let tensor = |len: usize| Tensor::<1>::ones([len], world.device()).into_dispatch();
            let (shard, complete) = (tensor(FLOATS / 4), tensor(FLOATS));
            let is_root = world.rank() == 0;
            let meta = |len: usize| TensorMeta {
                shape: [len].into(),
                dtype: DType::F32,
            };
            let metas = || vec![meta(FLOATS)];
            let counted = [
                sent(&job, world, || {
                    let shard = ShardedTensor {
                        tensor: shard.clone(),
                        dim: 0,
                        sizes: shard_sizes.clone(),
                    };
                    Ok(comm.all_gather("".into(), vec![shard]).wait().map(|_| ())?)
                })?,
                sent(&job, world, || {
                    let complete = ShardedTensor {
                        tensor: complete.clone(),
                        dim: 0,
                        sizes: shard_sizes.clone(),
                    };
                    Ok(comm
                        .reduce_scatter("".into(), vec![complete], ReduceOp::Sum)
                        .wait()
                        .map(|_| ())?)
                })?,
                sent(&job, world, || {
                    let tensors = is_root.then(|| vec![complete.clone()]);
                    Ok(comm
                        .broadcast("".into(), tensors, metas(), 0)
                        .wait()
                        .map(|_| ())?)
                })?,
                sent(&job, world, || {
                    let tensors = is_root.then(|| vec![complete.clone()]);
                    Ok(comm
                        .scatter(
                            "".into(),
                            tensors,
                            metas(),
                            vec![(0, shard_sizes.clone())],
                            0,
                        )
                        .wait()
                        .map(|_| ())?)
                })?,
                sent(&job, world, || {
                    let parts = vec![Some(shard.clone()); 4];
                    let metas = vec![Some(meta(FLOATS / 4)); 4];
                    Ok(comm
                        .all_to_all_list("".into(), parts, metas)
                        .wait()
                        .map(|_| ())?)
                })?,
            ];
            Ok(counted)
        })
    });
    let quarters = |process: usize| {
        let root = usize::from(process == 0);
        // Two shards; two quarters each of two tensors; the root's tensor; two quarters of it; two
        // tensors each of two ranks.
        [2, 4, 4 * root, 2 * root, 4]
    };
    for (process, end) in ends.into_iter().enumerate() {
        for (_, counted) in end.unwrap() {
            for (at, (bytes, quarters)) in counted.into_iter().zip(quarters(process)).enumerate() {
                let payloads = (quarters * FLOATS) as u64;
                assert!(
                    (payloads..payloads + 300).contains(&bytes),
                    "{at} in process {process}: {bytes} for {payloads}"
                );
            }
        }
    }
}

/// A two-phase all-reduce never sends full tensors. With 2 x 2 ranks, each rank sends two quarters
/// of its own tensor and one reduced quarter. With 4 processes, each sends three quarters, and a
/// reduced one to each of the three others.
#[test]
fn of_an_all_reduce_parts_are_sent_and_nothing_twice() {
    const FLOATS: usize = 4 << 17;
    for (processes, each, quarters) in [(2, 2, 2 * (2 + 1)), (4, 1, 3 + 3)] {
        let job = LoopbackJob::new(processes, 19);
        let ends = job.run(|_, processes| {
            launch(Launch::on_backend(processes.backend(each)), |world| {
                let comm = world.all();
                let tensor = Tensor::<1>::ones([FLOATS], world.device()).into_dispatch();
                let reduce = || {
                    Ok(comm
                        .all_reduce("".into(), vec![tensor.clone()], ReduceOp::Sum)
                        .wait()
                        .map(|_| ())?)
                };
                sent(&job, world, reduce)
            })
        });
        for (rank, bytes) in ends.into_iter().flat_map(|end| end.unwrap()) {
            let payloads = (quarters * FLOATS) as u64;
            assert!(
                (payloads..payloads + 1000).contains(&bytes),
                "rank {rank}: {bytes} for {payloads}"
            );
        }
    }
}

/// Forward calls the all-gathers of backward as deferred calls. Their data must not arrive before
/// it is waited for.
#[test]
fn a_deferred_gather_is_sent_when_it_is_needed_and_not_before() {
    const FLOATS: usize = 1 << 14;
    for each in [1, 2] {
        let job = LoopbackJob::new(2, 18);
        let ends = job.run(|process, processes| {
            launch(Launch::on_backend(processes.backend(each)), |world| {
                let comm = world.all();
                let shard =
                    |value: usize| Tensor::<1>::full([FLOATS], value as f32, world.device());
                let gather = |value: usize| {
                    let tensor = shard(10 * value + world.rank()).into_dispatch();
                    let shard_sizes = ShardSizes::Chunked(world.size() * FLOATS);
                    comm.all_gather(
                        Call::new("unit").with_deferred(),
                        vec![ShardedTensor {
                            tensor,
                            dim: 0,
                            sizes: shard_sizes,
                        }],
                    )
                };
                let mut works: Vec<_> = (0..6).map(gather).collect();
                world.barrier("all have called")?;
                let mut sent = vec![job.sent(process)];
                // All can complete without another call of a rank.
                assert!(works.iter().all(Work::is_complete));
                world.barrier("all have read the counter")?;
                let not_waited_for = works.remove(3);
                while let Some(work) = works.pop() {
                    let value = if works.len() >= 3 {
                        works.len() + 1
                    } else {
                        works.len()
                    };
                    let complete = Tensor::<1>::from_dispatch(work.wait()?.remove(0))
                        .into_data()
                        .try_to_vec::<f32>()
                        .unwrap();
                    let expected =
                        (0..world.size()).flat_map(|rank| vec![(10 * value + rank) as f32; FLOATS]);
                    assert!(complete.into_iter().eq(expected), "call {value}");
                    world.barrier("all have the result")?;
                    sent.push(job.sent(process));
                    world.barrier("all have read the counter")?;
                }
                drop(not_waited_for);
                Ok(sent)
            })
        });
        let payload = (each * FLOATS * size_of::<f32>()) as u64;
        for (rank, sent) in ends
            .into_iter()
            .flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")))
        {
            // Numbers of payloads: none before the first request; then those of the requested calls
            // 5, 4, 2, 1 and 0.
            let payloads: Vec<_> = sent.iter().map(|sent| sent / payload).collect();
            assert_eq!(
                payloads,
                [0, 1, 2, 3, 4, 5],
                "rank {rank} of {each} in a process"
            );
        }
    }
}

/// The backend keeps offered data for the ranks that may request it, and releases it when all have
/// declined.
#[test]
fn what_no_rank_needs_is_returned() {
    let job = LoopbackJob::new(2, 19);
    job.run(|_, processes| {
        let ends = launch(Launch::on_backend(processes.backend(2)), |world| {
            let comm = world.all();
            let tensor = Tensor::<1>::ones([1 << 10], world.device());
            let shard = ShardedTensor {
                tensor: tensor.clone().into_dispatch(),
                dim: 0,
                sizes: ShardSizes::Chunked(4 << 10),
            };
            let work = comm.all_gather(Call::new("unit").with_deferred(), vec![shard]);
            assert!(!tensor.can_mut());
            drop(work);
            // After the first barrier a rank has received and declined all offers. After the
            // second, all replies have arrived.
            world.barrier("all have dropped the operation")?;
            world.barrier("all have declined")?;
            assert!(tensor.can_mut());
            Ok(())
        });
        ends.unwrap_or_else(|error| panic!("{error}"));
    });
}

/// Sends a long signature only in the first step that uses it.
#[test]
fn a_long_print_is_sent_once() {
    let job = LoopbackJob::new(2, 21);
    let ends = job.run(|_, processes| {
        launch(Launch::on_backend(processes.backend(2)), |world| {
            let comm = world.all();
            let step = |width: usize| {
                let names = (0..100).map(|at| format!("blocks.{at}.attention.query.weight").into());
                let shard = |_| {
                    let tensor = Tensor::<2>::ones([0, width], world.device()).into_dispatch();
                    ShardedTensor {
                        tensor,
                        dim: 0,
                        sizes: ShardSizes::Chunked(0),
                    }
                };
                let results = comm
                    .all_gather(
                        Call::new("unit").with_names(names),
                        (0..100).map(shard).collect(),
                    )
                    .wait()?;
                assert_eq!(results[99].shape()[1], width);
                Ok(())
            };
            let mut bytes = Vec::new();
            for width in [7, 8, 7, 8, 7] {
                bytes.push(sent(&job, world, || step(width))?);
            }
            Ok(bytes)
        })
    });
    for (rank, bytes) in ends
        .into_iter()
        .flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")))
    {
        // Bytes of two ranks: 100 names of about 30 bytes, then 100 shapes and dtypes of signatures
        // and of payload descriptions.
        let is_long = bytes.iter().map(|bytes| *bytes > 6000).collect::<Vec<_>>();
        assert_eq!(
            is_long,
            [true, true, false, false, false],
            "rank {rank}: {bytes:?}"
        );
        assert!(
            bytes[2..].iter().all(|bytes| *bytes < 1000),
            "rank {rank}: {bytes:?}"
        );
    }
}
