//! Collectives whose tensors the ranks exchange by NCCL, on simulated GPUs.

use std::collections::HashSet;
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Distribution, Tensor};
use parking_lot::Mutex;

use super::super::ProcessJob;
use crate::comm::data::nccl::fake::{FakeGpus, NcclCall, NcclVersion, OrderingStep};
use crate::comm::{
    CommError, Communicator, Launch, LaunchError, NcclReductions, ReduceOp, SimulatedGpus,
    TensorMeta, Work, World, launch,
};
use crate::dtensor::ops::random;
use crate::fsdp::{FullyShard, fully_shard, unit};
use crate::mesh::DeviceMesh;
use crate::optim::sharded;
use crate::placement::ShardSizes;
use crate::testing::{Conformance, LoopbackJob};
use crate::{Error, Result};

/// Time after which a rank that waits for one that never starts an exchange fails.
const FAR: Duration = Duration::from_secs(60);

fn reductions(in_tree: bool) -> NcclReductions {
    match in_tree {
        true => NcclReductions::FixedTree,
        false => NcclReductions::Native,
    }
}

/// Returns the configuration of a launch of `ranks` ranks of this process on `gpus`.
pub(super) fn threads(ranks: usize, gpus: &SimulatedGpus, in_tree: bool) -> Launch {
    gpus.threads(ranks, reductions(in_tree)).with_deadline(FAR)
}

/// Returns the configuration of a launch of `each` ranks in this simulated process on `gpus`.
pub(super) fn process(
    job: &ProcessJob,
    each: usize,
    gpus: &SimulatedGpus,
    in_tree: bool,
) -> Launch {
    gpus.processes(job, each, reductions(in_tree))
        .with_deadline(FAR)
}

/// Checks that no rule was broken, and that everything is freed.
pub(super) fn assert_clean(gpus: &SimulatedGpus) {
    assert_eq!(gpus.violations(), Vec::<String>::new());
}

/// Runs `program` on `ranks` ranks of one process, and, if `ranks` is even, on as many in two
/// processes. Returns the values of all ranks each time.
fn everywhere<T: Send>(
    ranks: usize,
    in_tree: bool,
    program: impl Fn(&World) -> Result<T> + Sync,
) -> Vec<Vec<T>> {
    let of_threads = SimulatedGpus::new();
    let values = |launched: std::result::Result<Vec<(usize, T)>, LaunchError>| {
        let values = launched.unwrap().into_iter();
        values.map(|(_, value)| value).collect::<Vec<_>>()
    };
    let mut all = vec![values(launch(
        threads(ranks, &of_threads, in_tree),
        &program,
    ))];
    assert_clean(&of_threads);
    if ranks.is_multiple_of(2) {
        let of_processes = SimulatedGpus::new();
        let values = LoopbackJob::new(2, 45).run(|_, job| {
            values(launch(
                process(job, ranks / 2, &of_processes, in_tree),
                &program,
            ))
        });
        all.push(values.into_iter().flatten().collect());
        assert_clean(&of_processes);
    }
    all
}

/// True if conformance is also tested on 4 and 8 ranks, which takes minutes.
fn is_long() -> bool {
    std::env::var_os("LONG_TESTS").is_some()
}

#[test]
fn ranks_of_one_process_conform() {
    for in_tree in [false, true] {
        let used = Mutex::new(Vec::new());
        let launch = |ranks| {
            let gpus = SimulatedGpus::new();
            used.lock().push(gpus.clone());
            threads(ranks, &gpus, in_tree)
        };
        let report = Conformance::of(launch)
            .with_ranks(if is_long() { vec![4, 8] } else { vec![2, 3] })
            .with_few_cases()
            .run();
        assert!(report.total() > 1000, "{report}");
        for gpus in used.lock().iter() {
            assert_clean(gpus);
        }
    }
}

#[test]
fn processes_conform() {
    let long = [(4, 1, 49, true), (2, 4, 43, false)];
    let long = long.into_iter().filter(|_| is_long());
    let always = [(2, 1, 41, false), (2, 2, 42, true)];
    for (processes, each, seed, in_tree) in always.into_iter().chain(long) {
        // The number of launches of each process so far. All make the same launches, and find the GPUs
        // of the same launch.
        let launches = Mutex::new(vec![0; processes]);
        let used = Mutex::new(Vec::<SimulatedGpus>::new());
        let reports = LoopbackJob::new(processes, seed).run(|index, job| {
            Conformance::of(|_| {
                let gpus = {
                    let number = &mut launches.lock()[index];
                    let mut used = used.lock();
                    if used.len() == *number {
                        used.push(SimulatedGpus::new());
                    }
                    *number += 1;
                    used[*number - 1].clone()
                };
                process(job, each, &gpus, in_tree)
            })
            .with_ranks([processes * each])
            .with_few_cases()
            .run()
        });
        for report in reports {
            assert!(report.total() > 1000, "{report}");
        }
        for gpus in used.lock().iter() {
            assert_clean(gpus);
        }
    }
}

/// Returns true if every value of an all-reduce and of an all-gather is right, over a few rounds.
fn are_right(world: &World) -> Result<bool> {
    let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
    let rank = world.rank() as f32;
    let mut right = true;
    for round in 0..3 {
        let own = Tensor::<1>::full([5], rank + round as f32, world.device());
        let sum = mesh.all_reduce(own.clone(), ReduceOp::Sum)?.into_data();
        let all = mesh.all_gather(own, 0)?.into_data();
        let values = |rank: usize| vec![rank as f32 + round as f32; 5];
        let total: f32 = (0..world.size()).map(|rank| values(rank)[0]).sum();
        right &= sum.iter::<f32>().eq(vec![total; 5]);
        right &= all.iter::<f32>().eq((0..world.size()).flat_map(values));
    }
    Ok(right)
}

/// Gathers tensors in a call that was posted before the result of another was taken, whose memory it
/// then uses.
fn reuses_memory(world: &World) -> Result<bool> {
    let size = world.size();
    let full = TensorMeta {
        shape: [size, 64].into(),
        dtype: DType::F32,
    };
    let comm = world.all();
    let plan = comm.plan_all_gather(vec![(full, 0, ShardSizes::Chunked(size))])?;
    let post = |value: f32, call: crate::comm::Call| {
        let own = Tensor::<2>::full([1, 64], value, world.device()).into_dispatch();
        comm.execute_plan(call, &plan, vec![own])
    };
    post(0.0, "first".into()).wait()?;
    let later = post(1.0, crate::comm::Call::new("later").with_deferred());
    let now = post(2.0, "now".into());
    let mut right = true;
    for (value, work) in [(2.0, now), (1.0, later)] {
        let all = Tensor::<2>::from_dispatch(work.wait()?.remove(0)).into_data();
        right &= all.iter::<f32>().all(|of_rank| of_rank == value);
    }
    Ok(right)
}

#[test]
fn a_forgotten_step_is_found() {
    for forgotten in [None].into_iter().chain(OrderingStep::ALL.map(Some)) {
        for in_tree in [false, true] {
            let gpus = SimulatedGpus::of(FakeGpus::new().with_forgotten(forgotten));
            let mut right = launch(threads(2, &gpus, in_tree), are_right).unwrap();
            right.extend(launch(threads(2, &gpus, in_tree), reuses_memory).unwrap());
            assert!(forgotten.is_some() || right.iter().all(|(_, right)| *right));
            let violations = gpus.gpus().broken_rules();
            assert_eq!(
                violations.is_empty(),
                forgotten.is_none(),
                "{forgotten:?}: {violations:?}"
            );
        }
    }
}

#[test]
fn values_are_right_on_many_ranks() {
    for ranks in [2, 3, 4, 8] {
        for in_tree in [false, true] {
            for values in everywhere(ranks, in_tree, are_right) {
                assert_eq!(values, vec![true; ranks]);
            }
        }
    }
}

/// Sums `value` over the ranks of the world.
pub(super) fn sum(world: &World, value: f32) -> Work<Vec<DispatchTensor>> {
    let tensor = Tensor::<1>::full([3], value, world.device()).into_dispatch();
    world
        .all()
        .all_reduce("sum".into(), vec![tensor], ReduceOp::Sum)
}

#[test]
fn a_rank_that_drops_its_request_still_takes_part() {
    let sums = everywhere(4, false, |world| {
        if world.rank() == 1 {
            drop(sum(world, 10.0));
            return Ok(None);
        }
        let sum = sum(world, 1.0).wait()?.remove(0);
        let sum = Tensor::<1>::from_dispatch(sum).into_data();
        Ok(sum.iter::<f32>().next())
    });
    for sums in sums {
        assert_eq!(sums, [Some(13.0), None, Some(13.0), Some(13.0)]);
    }
}

pub(super) fn data_plane_error(error: &Error) -> (usize, &str, &str) {
    let Error::Comm(CommError::DataPlane {
        rank,
        plane,
        problem,
    }) = error
    else {
        panic!("{error}")
    };
    (*rank, plane, problem)
}

/// Returns the number of calls of a kind for each GPU.
pub(super) fn count(
    gpus: &SimulatedGpus,
    ranks: usize,
    is_counted: impl Fn(&NcclCall) -> bool,
) -> Vec<usize> {
    let calls = gpus.gpus().calls();
    let of = |gpu: usize| {
        let calls = calls.iter().filter(|call| call.gpu == gpu);
        calls.filter(|call| is_counted(&call.call)).count()
    };
    (0..ranks).map(of).collect()
}

#[test]
fn a_gpu_that_is_lost_fails_the_world_and_communicators_are_aborted_once() {
    let gpus = SimulatedGpus::of(FakeGpus::new().with_lost(1));
    // Rank 1 drops its request, so only the GPU's thread sees that its exchange fails.
    let error = launch(threads(3, &gpus, false), |world| {
        let work = sum(world, 1.0);
        if world.rank() == 1 {
            drop(work);
            return Ok(());
        }
        work.wait()?;
        // The simulated device has returned what it had, since the communicator was aborted.
        world.barrier("after")
    });
    let cause = error.unwrap_err().cause;
    assert_eq!(data_plane_error(&cause), (1, "nccl", "the GPU is lost"));
    assert_clean(&gpus);
    assert_eq!(count(&gpus, 3, |call| *call == NcclCall::Abort), [1; 3]);
}

#[test]
fn an_operation_that_fails_later_is_the_same_error_on_all_ranks() {
    for processes in [1, 2] {
        let gpus = SimulatedGpus::of(FakeGpus::new().with_failure(1, 2));
        let program = |world: &World| -> Result<()> {
            loop {
                sum(world, 1.0).wait()?;
            }
        };
        let run = |launched| launch(launched, program).unwrap_err();
        let errors = match processes {
            1 => vec![run(threads(2, &gpus, false))],
            _ => LoopbackJob::new(2, 44).run(|_, job| run(process(job, 1, &gpus, false))),
        };
        for error in errors {
            assert_eq!(
                data_plane_error(&error.cause),
                (1, "nccl", "unhandled system error")
            );
        }
        assert_clean(&gpus);
        assert_eq!(count(&gpus, 2, |call| *call == NcclCall::Abort), [1; 2]);
    }
}

#[test]
fn an_operation_that_never_ends_fails_at_the_deadline() {
    for processes in [1, 2] {
        let gpus = SimulatedGpus::of(FakeGpus::new().with_hang(2));
        let program = |world: &World| -> Result<()> {
            loop {
                sum(world, 1.0).wait()?;
            }
        };
        let run = |launched: Launch| {
            let launched = launched.with_deadline(Duration::from_millis(200));
            launch(launched, program).unwrap_err()
        };
        let errors = match processes {
            1 => vec![run(threads(2, &gpus, false))],
            _ => LoopbackJob::new(2, 48).run(|_, job| run(process(job, 1, &gpus, false))),
        };
        for error in errors {
            let (_, _, problem) = data_plane_error(&error.cause);
            assert!(problem.contains("was not done within"), "{error}");
        }
        assert_clean(&gpus);
    }
}

#[test]
fn ranks_that_share_a_gpu_are_refused_before_a_version() {
    for (version, is_refused) in [
        (NcclVersion(2, 28, 9), true),
        (NcclVersion(2, 30, 7), false),
    ] {
        let gpus = FakeGpus::new().with_version(version).with_shared(1, 0);
        let gpus = SimulatedGpus::of(gpus);
        let result = launch(threads(2, &gpus, false), are_right);
        match result {
            Ok(right) => assert!(!is_refused && right.iter().all(|(_, right)| *right)),
            Err(error) => {
                let (_, _, problem) = data_plane_error(&error.cause);
                assert!(
                    is_refused && problem.contains("ranks 0 and 1 have the same GPU"),
                    "{error}"
                );
            }
        }
        assert_clean(&gpus);
    }
}

#[test]
fn survivors_have_communicators_of_their_own() {
    let gpus = SimulatedGpus::new();
    let sums = launch(threads(3, &gpus, false), |world| {
        // The world may have failed by the time that a rank takes the result.
        let _ = sum(world, 1.0).wait();
        if world.rank() == 1 {
            return Err(Error::other("this rank gives up"));
        }
        let _ = world.barrier("fails");
        let world = world.shrink()?;
        let sum = sum(&world, 2.0).wait()?.remove(0);
        let sum = Tensor::<1>::from_dispatch(sum).into_data();
        Ok(sum.iter::<f32>().next())
    });
    let sums: Vec<_> = sums.unwrap().into_iter().map(|(_, sum)| sum).collect();
    assert_eq!(sums, [Some(4.0); 2]);
    assert_clean(&gpus);
    assert_eq!(
        count(&gpus, 3, |call| *call == NcclCall::Connect),
        [2, 2, 1]
    );
}

#[test]
fn exchanges_of_groups_start_in_one_order() {
    // Ranks post the calls of groups that span the processes in different orders, and complete them
    // in others.
    let done = everywhere(4, false, |world| {
        let rank = world.rank();
        let groups = [
            world.all(),
            world.group(&[rank % 2, rank % 2 + 2])?,
            world.group(&[rank.min(3 - rank), rank.max(3 - rank)])?,
        ];
        for round in 0..40 {
            let post = |at: usize| {
                let tensor = Tensor::<1>::full([2], 1.0, world.device()).into_dispatch();
                groups[at].all_reduce("sum".into(), vec![tensor], ReduceOp::Sum)
            };
            let order = |from: usize| (0..6).map(move |call| (call + from) % 3);
            let calls: Vec<_> = order(rank + round).map(post).collect();
            for call in calls.into_iter().rev() {
                call.wait()?;
            }
        }
        Ok(true)
    });
    assert!(done.into_iter().flatten().all(|done| done));
}

#[test]
fn shards_are_padded_if_that_adds_little() {
    let full = |rows: usize| TensorMeta {
        shape: [rows, 64].into(),
        dtype: DType::F32,
    };
    for (rows, is_padded) in [(100, true), (101, true), (6, false)] {
        let gpus = SimulatedGpus::new();
        launch(threads(4, &gpus, false), |world| {
            let sizes = ShardSizes::Chunked(rows);
            let plan = world
                .all()
                .plan_all_gather(vec![(full(rows), 0, sizes.clone())])?;
            let own = sizes.range(4, world.rank()).len();
            let own = Tensor::<2>::full([own, 64], world.rank() as f32, world.device());
            let all = world
                .all()
                .execute_plan("gather".into(), &plan, vec![own.into_dispatch()])
                .wait()?;
            let all = Tensor::<2>::from_dispatch(all[0].clone()).into_data();
            let expected =
                (0..4).flat_map(|rank| vec![rank as f32; sizes.range(4, rank).len() * 64]);
            assert!(all.iter::<f32>().eq(expected));
            Ok(())
        })
        .unwrap();
        assert_clean(&gpus);
        let rows = count(&gpus, 4, |call| matches!(call, NcclCall::AllGather { .. }));
        let pairs = count(&gpus, 4, |call| matches!(call, NcclCall::Pairs { .. }));
        let expected = if is_padded {
            ([1; 4], [0; 4])
        } else {
            ([0; 4], [1; 4])
        };
        assert_eq!((rows, pairs), (expected.0.to_vec(), expected.1.to_vec()));
    }
}

#[test]
fn groups_of_other_orders_may_share_a_plan() {
    let rows = everywhere(2, false, |world| {
        let groups = [world.group(&[0, 1])?, world.group(&[1, 0])?];
        let full = TensorMeta {
            shape: [3, 2].into(),
            dtype: DType::F32,
        };
        let sizes = ShardSizes::Chunked(3);
        let plan = groups[0].plan_all_gather(vec![(full, 0, sizes.clone())])?;
        let gather = |group: &Communicator| -> Result<Vec<f32>> {
            let len = sizes.range(2, group.group().rank()).len();
            let own = Tensor::<2>::full([len, 2], world.rank() as f32, world.device());
            let all = group.execute_plan("gather".into(), &plan, vec![own.into_dispatch()]);
            let all = Tensor::<2>::from_dispatch(all.wait()?.remove(0));
            Ok(all.into_data().iter().collect())
        };
        Ok([gather(&groups[0])?, gather(&groups[1])?])
    });
    let rows_of = |ranks: [f32; 3]| ranks.into_iter().flat_map(|rank| [rank; 2]).collect();
    let expected: [Vec<f32>; 2] = [rows_of([0.0, 0.0, 1.0]), rows_of([1.0, 1.0, 0.0])];
    for rows in rows.into_iter().flatten() {
        assert_eq!(rows, expected);
    }
}

/// Trains a sharded model, and returns the losses of each rank. `gpus` counts host waits meanwhile.
fn losses(launched: Launch, gpus: Option<&SimulatedGpus>) -> Vec<Vec<f32>> {
    let ranks = launch(launched, |world| {
        let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
        let device = world.device().clone().autodiff();
        let layer = |_| LinearConfig::new(5, 5).init(&device);
        let net: Vec<Linear> = world.run_seeded(3, || (0..3).map(layer).collect())?;
        let mut net = fully_shard(net, &mesh, FullyShard::new().with_units(["*"]))?;
        let mut optim = sharded(SgdConfig::new());
        let mut losses = Vec::new();
        for _ in 0..4 {
            let x: Tensor<2> = random::tensor([3, 5], Distribution::Default, &device);
            let run =
                |x, layer: &Linear| unit(layer, x, |layer, x: Tensor<2>| layer.forward(x).tanh());
            let loss = net.iter().fold(x, run).square().mean();
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            net = optim.step(0.1, net, grads)?;
        }
        drop(net);
        // Communicators end later, and wait then.
        assert_eq!(gpus.map_or(0, SimulatedGpus::host_waits), 0);
        Ok(losses)
    });
    ranks
        .unwrap()
        .into_iter()
        .map(|(_, losses)| losses)
        .collect()
}

fn bits(losses: &[Vec<f32>]) -> Vec<Vec<u32>> {
    let bits = |losses: &Vec<f32>| losses.iter().map(|loss| loss.to_bits()).collect();
    losses.iter().map(bits).collect()
}

#[test]
fn sharded_training_has_the_same_losses() {
    for ranks in [2, 3, 4] {
        let expected = losses(Launch::threads(ranks), None);
        let gpus = SimulatedGpus::new();
        let in_tree = losses(threads(ranks, &gpus, true), Some(&gpus));
        assert_eq!(bits(&in_tree), bits(&expected));
        assert_clean(&gpus);
        let gpus = SimulatedGpus::new();
        let native = losses(threads(ranks, &gpus, false), Some(&gpus));
        for (native, expected) in native.iter().flatten().zip(expected.iter().flatten()) {
            assert!((native - expected).abs() <= 1e-6, "{native} {expected}");
        }
        assert_clean(&gpus);
    }
}

#[test]
fn a_rank_has_one_stream_for_all_models_and_groups() {
    let gpus = SimulatedGpus::new();
    launch(threads(4, &gpus, false), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
        let device = world.device().clone().autodiff();
        let model = |seed| {
            let model = world.run_seeded(seed, || LinearConfig::new(5, 5).init(&device))?;
            fully_shard(model, &mesh, FullyShard::new())
        };
        let models: [Linear; 2] = [model(3)?, model(4)?];
        let x = Tensor::<2>::ones([3, 5], &device);
        let run = |x, model: &Linear| unit(model, x, |model, x: Tensor<2>| model.forward(x));
        models.iter().fold(x, run).sum().backward();
        Ok(())
    })
    .unwrap();
    assert_clean(&gpus);
    let calls = gpus.gpus().calls();
    for gpu in 0..4 {
        let of_gpu = || calls.iter().filter(|call| call.gpu == gpu);
        let streams: HashSet<_> = of_gpu().filter_map(|call| call.stream).collect();
        let cliques: HashSet<_> = of_gpu().map(|call| call.clique).collect();
        assert!(
            streams.len() == 1 && cliques.len() > 2,
            "{streams:?} {cliques:?}"
        );
    }
}

/// Posts a deferred all-gather of the rank's number.
pub(super) fn deferred(world: &World) -> Result<Work<Vec<DispatchTensor>>> {
    let comm = world.all();
    let full = TensorMeta {
        shape: [world.size(), 8].into(),
        dtype: DType::F32,
    };
    let sizes = ShardSizes::Chunked(world.size());
    let plan = comm.plan_all_gather(vec![(full, 0, sizes)])?;
    let own = Tensor::<2>::full([1, 8], world.rank() as f32, world.device());
    let call = crate::comm::Call::new("later").with_deferred();
    Ok(comm.execute_plan(call, &plan, vec![own.into_dispatch()]))
}

/// Runs `program` on `ranks` ranks: in one process, in one process each, and in two processes.
pub(super) fn on_all(ranks: usize, program: impl Fn(&World, &SimulatedGpus) -> Result<()> + Sync) {
    [1, 2, ranks]
        .into_iter()
        .for_each(|processes| on_processes(ranks, processes, &program));
}

/// Runs `program` on `ranks` ranks of this number of processes.
pub(super) fn on_processes(
    ranks: usize,
    processes: usize,
    program: impl Fn(&World, &SimulatedGpus) -> Result<()> + Sync,
) {
    let all_succeed = |launched: std::result::Result<Vec<(usize, ())>, LaunchError>| {
        launched.unwrap_or_else(|error| panic!("{error}"));
    };
    let gpus = SimulatedGpus::new();
    if processes == 1 {
        let launched = threads(ranks, &gpus, false);
        all_succeed(launch(launched, |world| program(world, &gpus)));
    } else {
        LoopbackJob::new(processes, 46).run(|_, job| {
            let launched = process(job, ranks / processes, &gpus, false);
            all_succeed(launch(launched, |world| program(world, &gpus)));
        });
    }
    assert_clean(&gpus);
    // As when a rank waits in vain for another's part.
    assert_eq!(
        count(&gpus, ranks, |call| *call == NcclCall::Abort),
        vec![0; ranks]
    );
}

fn gathers(gpus: &SimulatedGpus, ranks: usize) -> Vec<usize> {
    count(gpus, ranks, |call| {
        matches!(call, NcclCall::AllGather { .. })
    })
}

#[test]
fn a_deferred_call_starts_when_the_first_rank_needs_it() {
    on_all(4, |world, gpus| {
        // The ranks connect in the first call, which is not deferred.
        deferred(world)?.wait()?;
        let later = deferred(world)?;
        world.barrier("posted")?;
        assert_eq!(gathers(gpus, 4), [1; 4]);
        world.barrier("checked")?;
        if world.rank() == 2 {
            let all = Tensor::<2>::from_dispatch(later.wait()?.remove(0)).into_data();
            let expected = (0..4).flat_map(|rank| [rank as f32; 8]);
            assert!(all.iter::<f32>().eq(expected));
        } else {
            drop(later);
        }
        world.barrier("done")?;
        assert_eq!(gathers(gpus, 4), [2; 4]);
        Ok(())
    });
}

#[test]
fn a_deferred_call_that_all_ranks_give_up_does_not_start() {
    on_all(4, |world, gpus| {
        deferred(world)?.wait()?;
        for _ in 0..3 {
            drop(deferred(world)?);
        }
        // Other calls of the group continue.
        sum(world, 1.0).wait()?;
        world.barrier("done")?;
        assert_eq!(gathers(gpus, 4), [1; 4]);
        Ok(())
    });
}

/// Fault of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Gpu,
    Operation,
    Panic,
    Return,
}

#[test]
fn faults_are_the_same_error_on_all_ranks() {
    for fault in [Fault::Gpu, Fault::Operation, Fault::Panic, Fault::Return] {
        for (processes, each) in [(1, 2), (1, 4), (1, 8), (2, 1), (4, 1), (2, 2), (2, 4)] {
            let ranks = processes * each;
            let last = ranks - 1;
            let gpus = SimulatedGpus::of(match fault {
                Fault::Gpu => FakeGpus::new().with_lost(last),
                Fault::Operation => FakeGpus::new().with_failure(last, 3),
                Fault::Panic | Fault::Return => FakeGpus::new(),
            });
            let ended = Mutex::new(vec![None; ranks]);
            let program = |world: &World| -> Result<()> {
                let run = || loop {
                    if let Err(error) = sum(world, 1.0).wait() {
                        return Error::from(error);
                    }
                    if world.rank() == last && fault == Fault::Panic {
                        panic!("boom");
                    }
                    if world.rank() == last && fault == Fault::Return {
                        return Error::other("gives up");
                    }
                };
                let error = run();
                ended.lock()[world.rank()] = Some(error.to_string());
                Err(error)
            };
            let fails = |launched| launch(launched, program).unwrap_err().rank;
            let at_fault = match processes {
                1 => vec![fails(threads(each, &gpus, false))],
                _ => LoopbackJob::new(processes, 47)
                    .run(|_, job| fails(process(job, each, &gpus, false))),
            };
            let case = format!("{fault:?}, {processes} processes of {each}");
            assert_eq!(at_fault, vec![last; processes], "{case}");
            let mut ended = ended.into_inner();
            if matches!(fault, Fault::Panic | Fault::Return) {
                // Its error is its own.
                ended.pop();
            }
            let text = match fault {
                Fault::Gpu => "the GPU is lost",
                Fault::Operation => "unhandled system error",
                Fault::Panic => "boom",
                Fault::Return => "gives up",
            };
            for error in ended {
                let error = error.unwrap_or_else(|| panic!("{case}: a rank did not end"));
                let names_rank = error.contains(&format!("rank {last}"));
                assert!(error.contains(text) && names_rank, "{case}: {error}");
            }
            assert_clean(&gpus);
            let aborts = count(&gpus, ranks, |call| *call == NcclCall::Abort);
            assert!(
                aborts.iter().all(|aborts| *aborts <= 1),
                "{case}: {aborts:?}"
            );
        }
    }
}
