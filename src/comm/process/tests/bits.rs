//! The same bits as threads, and no more bytes than must be.

use burn::backend::TensorMetadata;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Distribution, Tensor, TensorData};

use super::loopback::Job;
use crate::Result;
use crate::comm::engine::{Message, into_data};
use crate::comm::{Call, Launch, ReduceOp, Sharded, TensorMeta, Work, World, launch};
use crate::fsdp::{FullyShard, full_model, fully_shard};
use crate::mesh::DeviceMesh;
use crate::param::unit;
use crate::placement::Cut;

/// Worlds of four ranks: on threads, and in 1, 2 and 4 processes.
fn everywhere<T: Send + std::fmt::Debug + PartialEq>(program: impl Fn(&World) -> Result<T> + Sync) {
    let expected = launch(Launch::threads(4), &program).unwrap_or_else(|error| panic!("{error}"));
    for (processes, each) in [(1, 4), (2, 2), (4, 1)] {
        let job = Job::new(processes, 11);
        let run = |_, processes: &super::super::Processes| launch(Launch::on(processes.engine(each)), &program);
        let got = job.run(run).into_iter().flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")));
        assert_eq!(got.collect::<Vec<_>>(), expected, "{processes} processes of {each}");
    }
}

/// Values of many sizes, which sum to other bits in other orders.
pub(super) fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + rank * 104_729) % 1013) as f32 / (1 << ((i + 3 * rank) % 11)) as f32 - 40.0).collect()
}

#[test]
fn reductions_are_those_of_threads_to_the_bit() {
    everywhere(|world| {
        let mut got = Vec::new();
        let values = values(world.rank(), 130 * 2900);
        for comm in [world.all(), world.group(&[2, 0, 3, 1])?, world.groups([vec![0, 2, 3], vec![1]])?.unwrap()] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::premul_sum(0.3)] {
                    // Large enough that ranks of a process share the work of an all-reduce, and processes halve it.
                    let data = TensorData::new(values.clone(), [130, 2900]);
                    let tensor = || Tensor::<2>::from_data(data.clone(), world.device()).cast(dtype).into_dispatch();
                    let empty = Tensor::<2>::empty([0, 3], world.device()).into_dispatch();
                    got.extend(comm.all_reduce("whole".into(), vec![empty, tensor()], op).wait()?);
                    let shard = |dim: usize| Sharded { tensor: tensor(), dim, cut: Cut::Chunks(130 + 2770 * dim) };
                    got.extend(comm.reduce_scatter("parts".into(), vec![shard(0), shard(1)], op).wait()?);
                }
            }
        }
        Ok(got.into_iter().map(into_data).map(|data| data.as_bytes().to_vec()).collect::<Vec<_>>())
    });
}

/// Several segments where every rank is alone in its process, with edges inside tensors: waited for, left to the hands,
/// dropped, two at once.
#[test]
fn large_all_reduces_are_those_of_threads() {
    everywhere(|world| {
        let given = |seed: usize, dtype: DType, shape: [usize; 2]| {
            let data = TensorData::new(values(world.rank() + seed, shape.iter().product()), shape);
            Tensor::<2>::from_data(data, world.device()).cast(dtype).into_dispatch()
        };
        let large = |seed| given(seed, DType::F32, [7, 300_001]);
        let call = |op| {
            let tensors = vec![large(1), given(2, DType::F32, [0, 3]), given(3, DType::BF16, [1, 1_000_003]), large(5)];
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
        // By burn's operations.
        got.extend(call(ReduceOp::premul_sum(0.5)).wait()?);
        world.barrier("all have theirs")?;
        Ok(got.into_iter().map(into_data).map(|data| data.as_bytes().to_vec()).collect::<Vec<_>>())
    });
}

/// Parts that are large enough to land in the results, where they are in one piece there, and others beside them.
#[test]
fn gathers_of_large_parts_are_those_of_threads() {
    everywhere(|world| {
        let mut got = Vec::new();
        for comm in [world.all(), world.group(&[2, 0, 3, 1])?, world.groups([vec![0, 2, 3], vec![1]])?.unwrap()] {
            let (ranks, rank) = (comm.group().size(), comm.group().rank());
            let lengths: Vec<usize> = (0..ranks).map(|rank| [400, 0, 1, 333][rank]).collect();
            let shard = |before: usize, cut: Cut, inner: usize, dtype: DType| {
                let shape = [before, cut.range(ranks, rank).len(), inner];
                let data = TensorData::new(values(world.rank(), shape.iter().product()), shape);
                let tensor = Tensor::<3>::from_data(data, world.device()).cast(dtype).into_dispatch();
                Sharded { tensor, dim: 1, cut }
            };
            let even = || shard(1, Cut::Chunks(400), 180, DType::F32);
            let uneven = || shard(1, Cut::Lengths(lengths.clone().into()), 180, DType::BF16);
            let pieces = || shard(3, Cut::Chunks(401), 60, DType::F32);
            drop(comm.all_gather("dropped".into(), vec![even()]));
            for shards in [vec![even()], vec![uneven(), even()], vec![even(), pieces()]] {
                got.extend(comm.all_gather("large".into(), shards).wait()?);
            }
        }
        Ok(got.into_iter().map(into_data).map(|data| data.as_bytes().to_vec()).collect::<Vec<_>>())
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

/// On a mesh of replicas and shards, of which each dimension is within processes, across them, or both.
#[test]
fn a_sharded_model_trains_to_the_bits_of_threads() {
    for (shape, names) in [([2, 2], ["replicate", "shard"]), ([1, 4], ["replicate", "shard"])] {
        everywhere(|world| {
            let mesh = DeviceMesh::new(world, shape, names)?;
            let device = world.device().clone().autodiff();
            let param = |shape: [usize; 2], seed| {
                let data = TensorData::new(values(seed, shape[0] * shape[1]), shape);
                Param::from_tensor(Tensor::from_data(data, &device) * 0.01)
            };
            let linear = |outputs: usize, seed| {
                let bias = Param::from_tensor(Tensor::ones([outputs], &device));
                Linear { weight: param([16, outputs], seed), bias: Some(bias) }
            };
            let net = Net { blocks: (0..2).map(|seed| linear(16, seed)).collect(), head: linear(3, 2) };
            let mut net = fully_shard(net, &mesh, FullyShard::new().units(["blocks.*"]))?;
            let mut optim = AdamWConfig::new().init();
            let mut losses = Vec::new();
            for step in 0..4 {
                let x = TensorData::new(values(4 * step + world.rank(), 8 * 16), [8, 16]);
                let loss = (net.forward(Tensor::from_data(x, &device) * 0.01) - 1.0).square().mean();
                losses.push(loss.clone().into_scalar::<f32>().to_bits());
                let grads = GradientsParams::from_grads(loss.backward(), &net);
                net = optim.step(1e-2, net, grads);
            }
            let full = full_model(&net)?;
            Ok((losses, full.head.weight.val().into_data(), full.blocks[1].weight.val().into_data()))
        });
    }
}

/// What process `p` has sent in the meantime, as its first rank sees it while the others of all processes rest.
fn sent(job: &Job, world: &World, work: impl FnOnce() -> Result<()>) -> Result<u64> {
    let each = world.size() / job.processes();
    let process = world.rank() / each;
    let within = world.group(&(process * each..(process + 1) * each).collect::<Vec<_>>())?;
    world.barrier("all are here")?;
    within.barrier("none of this process goes on".into()).wait()?;
    let before = job.sent(process);
    within.barrier("both have looked".into()).wait()?;
    work()?;
    within.barrier("both are through".into()).wait()?;
    let after = job.sent(process);
    within.barrier("both have looked again".into()).wait()?;
    Ok(after - before)
}

#[test]
fn a_mesh_dimension_inside_a_process_sends_nothing() {
    let job = Job::new(2, 12);
    let ends = job.run(|_, processes| {
        launch(Launch::on(processes.engine(2)), |world| {
            let mesh = DeviceMesh::new(world, [2, 2], ["across", "inside"])?;
            let all = |dim: usize| {
                let comm = mesh.communicator(dim)?;
                let tensor = Tensor::<1>::random([64], Distribution::Default, world.device()).into_dispatch();
                comm.all_reduce("sum".into(), vec![tensor.clone()], ReduceOp::Sum).wait()?;
                let shard = || Sharded { tensor: tensor.clone(), dim: 0, cut: Cut::Chunks(128) };
                comm.all_gather("gather".into(), vec![shard()]).wait()?;
                comm.barrier("barrier".into()).wait()?;
                comm.send("to".into(), vec![tensor.clone()], 1 - comm.group().rank(), 0).wait()?;
                comm.receive("to".into(), None, None, 0).wait()?;
                Ok(())
            };
            Ok((sent(&job, world, || all(1))?, sent(&job, world, || all(0))?))
        })
    });
    for (_, (inside, across)) in ends.into_iter().flat_map(|end| end.unwrap()) {
        assert_eq!(inside, 0);
        // Of both ranks: a term, a shard and a message of 256 bytes each.
        assert!((6 * 256..6 * 256 + 1000).contains(&across), "{across}");
    }
}

/// What a process sends of a tensor of 4 x 256 floats on four ranks, two in each process, but for headers.
#[test]
fn the_other_process_gets_what_its_ranks_need_and_once() {
    const FLOATS: usize = 4 * 256;
    let job = Job::new(2, 13);
    let ends = job.run(|_, processes| {
        launch(Launch::on(processes.engine(2)), |world| {
            let (comm, cut) = (world.all(), Cut::Chunks(FLOATS));
            let tensor = |len: usize| Tensor::<1>::ones([len], world.device()).into_dispatch();
            let (shard, whole) = (tensor(FLOATS / 4), tensor(FLOATS));
            let is_root = world.rank() == 0;
            let meta = |len: usize| TensorMeta { shape: [len].into(), dtype: DType::F32 };
            let metas = || vec![meta(FLOATS)];
            let counted = [
                sent(&job, world, || {
                    let shard = Sharded { tensor: shard.clone(), dim: 0, cut: cut.clone() };
                    Ok(comm.all_gather("".into(), vec![shard]).wait().map(|_| ())?)
                })?,
                sent(&job, world, || {
                    let whole = Sharded { tensor: whole.clone(), dim: 0, cut: cut.clone() };
                    Ok(comm.reduce_scatter("".into(), vec![whole], ReduceOp::Sum).wait().map(|_| ())?)
                })?,
                sent(&job, world, || {
                    let tensors = is_root.then(|| vec![whole.clone()]);
                    Ok(comm.broadcast("".into(), tensors, metas(), 0).wait().map(|_| ())?)
                })?,
                sent(&job, world, || {
                    let tensors = is_root.then(|| vec![whole.clone()]);
                    Ok(comm.scatter("".into(), tensors, metas(), vec![(0, cut.clone())], 0).wait().map(|_| ())?)
                })?,
                sent(&job, world, || {
                    let parts = vec![Some(shard.clone()); 4];
                    let metas = vec![Some(meta(FLOATS / 4)); 4];
                    Ok(comm.all_to_all_list("".into(), parts, metas).wait().map(|_| ())?)
                })?,
            ];
            Ok(counted)
        })
    });
    let quarters = |process: usize| {
        let root = usize::from(process == 0);
        // Two shards; of two wholes two quarters each; the whole of the root; two quarters of it; two parts of two ranks.
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

/// An all-reduce in halves sends no whole tensor: of 2 x 2 ranks, two quarters of each rank's and a reduced one; of 4
/// processes three quarters, and a reduced one to each of the three others.
#[test]
fn of_an_all_reduce_parts_are_sent_and_nothing_twice() {
    const FLOATS: usize = 4 << 17;
    for (processes, each, quarters) in [(2, 2, 2 * (2 + 1)), (4, 1, 3 + 3)] {
        let job = Job::new(processes, 19);
        let ends = job.run(|_, processes| {
            launch(Launch::on(processes.engine(each)), |world| {
                let comm = world.all();
                let tensor = Tensor::<1>::ones([FLOATS], world.device()).into_dispatch();
                let reduce =
                    || Ok(comm.all_reduce("".into(), vec![tensor.clone()], ReduceOp::Sum).wait().map(|_| ())?);
                sent(&job, world, reduce)
            })
        });
        for (rank, bytes) in ends.into_iter().flat_map(|end| end.unwrap()) {
            let payloads = (quarters * FLOATS) as u64;
            assert!((payloads..payloads + 1000).contains(&bytes), "rank {rank}: {bytes} for {payloads}");
        }
    }
}

/// What is announced is not there yet: a rank that comes later goes on all the same. Nor does it get what others make of their
/// results meanwhile.
#[test]
fn all_reduces_in_halves_follow_each_other() {
    let job = Job::new(3, 20);
    let ends = job.run(|_, processes| {
        launch(Launch::on(processes.engine(1)), |world| {
            let tensor = || Tensor::<1>::full([300_000], world.rank() as f32, world.device()).into_dispatch();
            for call in 0..100 {
                let sum = world.all().all_reduce("sum".into(), vec![tensor()], ReduceOp::Sum).wait()?.remove(0);
                let changed = Tensor::<1>::from_dispatch(sum).mul_scalar(7.0);
                assert_eq!(changed.sum().into_scalar::<f32>(), 6_300_000.0, "call {call}");
            }
            Ok(())
        })
    });
    ends.into_iter().for_each(|end| drop(end.unwrap()));
}

/// Ranks that wait for nothing owe the others their parts, and those that wait in another order get theirs.
#[test]
fn all_reduces_in_halves_are_waited_for_in_any_order_or_not_at_all() {
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
            got.push((call, into_data(work.wait()?.remove(0)).as_bytes().to_vec()));
        }
        world.barrier("all have what they want")?;
        Ok(got)
    });
}

/// Backward's gathers are all called in forward: what belongs to others is here no earlier than one call before it is
/// waited for, in the order of backward.
#[test]
fn what_is_gathered_ahead_is_sent_when_it_is_wanted_and_not_before() {
    const FLOATS: usize = 1 << 14;
    for each in [1, 2] {
        let job = Job::new(2, 18);
        let ends = job.run(|process, processes| {
            launch(Launch::on(processes.engine(each)), |world| {
                let comm = world.all();
                let shard = |value: usize| Tensor::<1>::full([FLOATS], value as f32, world.device());
                let gather = |value: usize| {
                    let tensor = shard(10 * value + world.rank()).into_dispatch();
                    let cut = Cut::Chunks(world.size() * FLOATS);
                    comm.all_gather(Call::new("unit").ahead(), vec![Sharded { tensor, dim: 0, cut }])
                };
                let mut works: Vec<_> = (0..6).map(gather).collect();
                world.barrier("all have called")?;
                let mut sent = vec![job.sent(process)];
                // All can be had without waiting for another rank.
                assert!(works.iter().all(Work::is_complete));
                world.barrier("all have looked")?;
                let not_waited_for = works.remove(3);
                while let Some(work) = works.pop() {
                    let value = if works.len() >= 3 { works.len() + 1 } else { works.len() };
                    let whole =
                        Tensor::<1>::from_dispatch(work.wait()?.remove(0)).into_data().try_to_vec::<f32>().unwrap();
                    let expected = (0..world.size()).flat_map(|rank| vec![(10 * value + rank) as f32; FLOATS]);
                    assert!(whole.into_iter().eq(expected), "call {value}");
                    world.barrier("all have it")?;
                    sent.push(job.sent(process));
                    world.barrier("all have looked")?;
                }
                drop(not_waited_for);
                Ok(sent)
            })
        });
        let payload = (each * FLOATS * size_of::<f32>()) as u64;
        for (rank, sent) in ends.into_iter().flat_map(|end| end.unwrap_or_else(|error| panic!("{error}"))) {
            // In payloads: none before the first is wanted; then that of each wanted, of 5, 4, 2, 1 and 0, and of the next.
            let payloads: Vec<_> = sent.iter().map(|sent| sent / payload).collect();
            assert_eq!(payloads, [0, 2, 3, 5, 6, 6], "rank {rank} of {each} in a process");
        }
    }
}

/// What was offered is held for those who may ask, and no longer.
#[test]
fn what_nobody_wants_is_given_back() {
    let job = Job::new(2, 19);
    job.run(|_, processes| {
        let ends = launch(Launch::on(processes.engine(2)), |world| {
            let comm = world.all();
            let tensor = Tensor::<1>::ones([1 << 10], world.device());
            let shard = Sharded { tensor: tensor.clone().into_dispatch(), dim: 0, cut: Cut::Chunks(4 << 10) };
            let work = comm.all_gather(Call::new("unit").ahead(), vec![shard]);
            assert!(!tensor.can_mut());
            drop(work);
            // Who is through the first has heard of all offers, and declined them; who is through the second knows.
            world.barrier("all have given up")?;
            world.barrier("all have declined")?;
            assert!(tensor.can_mut());
            Ok(())
        });
        ends.unwrap_or_else(|error| panic!("{error}"));
    });
}

/// What only one rank of a process has of a tensor from elsewhere is in memory of its own: it may write there. Ranks of one
/// process may have one memory, and who writes gets another.
#[test]
fn no_rank_sees_what_another_writes() {
    for (processes, each) in [(2, 1), (2, 2)] {
        let job = Job::new(processes, 20);
        job.run(|_, processes| {
            let ends = launch(Launch::on(processes.engine(each)), |world| {
                let (comm, size) = (world.all(), world.size());
                let tensor = || Tensor::<1>::full([8], world.rank() as f32, world.device()).into_dispatch();
                let meta = TensorMeta { shape: [8].into(), dtype: DType::F32 };
                let root = (world.rank() == 0).then(|| vec![tensor()]);
                let got = comm.broadcast("".into(), root, vec![meta.clone()], 0).wait()?;
                // All of a process get that.
                let mut got: Vec<_> = got.into_iter().map(|tensor| (each == 1, tensor)).collect();
                let (parts, metas) = (vec![Some(tensor()); size], vec![Some(meta); size]);
                let own = world.rank();
                let parts = comm.all_to_all_list("".into(), parts, metas).wait()?.into_iter().flatten().enumerate();
                let is_elsewhere = |rank: usize| rank / each != own / each;
                got.extend(parts.filter(|(rank, _)| *rank != own).map(|(rank, part)| (is_elsewhere(rank), part)));
                comm.send("".into(), vec![tensor()], (own + 1) % size, 0).wait()?;
                let Message { from, tensors } = comm.receive("".into(), None, None, 0).wait()?;
                got.extend(tensors.into_iter().map(|tensor| (is_elsewhere(from), tensor)));
                world.barrier("nobody takes what is here any more")?;
                for (is_own, tensor) in got {
                    let tensor = Tensor::<1>::from_dispatch(tensor);
                    assert!(!is_own || tensor.can_mut(), "it is the rank's own");
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

/// What ranks must agree on may be long: it is said in the first step.
#[test]
fn a_long_print_is_sent_once() {
    let job = Job::new(2, 21);
    let ends = job.run(|_, processes| {
        launch(Launch::on(processes.engine(2)), |world| {
            let comm = world.all();
            let step = |width: usize| {
                let names = (0..100).map(|at| format!("blocks.{at}.attention.query.weight").into());
                let shard = |_| {
                    let tensor = Tensor::<2>::ones([0, width], world.device()).into_dispatch();
                    Sharded { tensor, dim: 0, cut: Cut::Chunks(0) }
                };
                let wholes = comm.all_gather(Call::new("unit").named(names), (0..100).map(shard).collect()).wait()?;
                assert_eq!(wholes[99].shape()[1], width);
                Ok(())
            };
            let mut bytes = Vec::new();
            for width in [7, 8, 7, 8, 7] {
                bytes.push(sent(&job, world, || step(width))?);
            }
            Ok(bytes)
        })
    });
    for (rank, bytes) in ends.into_iter().flat_map(|end| end.unwrap_or_else(|error| panic!("{error}"))) {
        // Of two ranks, in bytes: 100 names of about 30, then 100 shapes and dtypes of the prints and of the contents.
        let is_long = bytes.iter().map(|bytes| *bytes > 6000).collect::<Vec<_>>();
        assert_eq!(is_long, [true, true, false, false, false], "rank {rank}: {bytes:?}");
        assert!(bytes[2..].iter().all(|bytes| *bytes < 1000), "rank {rank}: {bytes:?}");
    }
}
