//! Gather and all-reduce results in shared memory, for ranks of one host.

use burn::backend::DispatchTensor;
use burn::tensor::{Tensor, TensorData};

use crate::Result;
use crate::comm::backend::{Backend, into_data};
use crate::comm::{Call, CommError, Launch, ReduceOp, ShardedTensor, Work, World, launch};
use crate::memory::flex;
use crate::placement::ShardSizes;
use crate::testing::LoopbackJob as Job;

/// Returns values of many magnitudes, whose floating-point sum depends on the order of addition.
fn values(rank: usize, len: usize) -> Vec<f32> {
    let value = |i| ((i * 7919 + rank * 104_729) % 1013) as f32 / (1 << ((i + 3 * rank) % 11)) as f32 - 40.0;
    // The remaining values repeat this period.
    let period = (0..1013 * 11).map(value).collect::<Vec<_>>();
    let mut values = period.repeat(len.div_ceil(period.len()));
    values.truncate(len);
    values
}

const LENS: [usize; 2] = [200_001, 90_000];

/// Gathers two tensors with uneven shards; the shard of the second to last rank is empty.
fn gather(world: &World, call: Call, seed: usize) -> Work<Vec<DispatchTensor>> {
    let (ranks, rank) = (world.size(), world.rank());
    let shard = |(index, len): (usize, usize)| {
        let mut lengths = vec![len / ranks; ranks];
        lengths[ranks - 2] = 0;
        lengths[0] = len - lengths[1..].iter().sum::<usize>();
        let sizes = ShardSizes::Uneven(lengths.into());
        let part = full(seed + index, len)[sizes.range(ranks, rank)].to_vec();
        let tensor = Tensor::<1>::from_data(TensorData::new(part.clone(), [part.len()]), world.device());
        ShardedTensor { tensor: tensor.into_dispatch(), dim: 0, sizes }
    };
    world.all().all_gather(call, LENS.into_iter().enumerate().map(shard).collect())
}

fn full(seed: usize, len: usize) -> Vec<f32> {
    values(seed, len)
}

fn check(gathered: Vec<DispatchTensor>, seed: usize) {
    for (index, (tensor, len)) in gathered.into_iter().zip(LENS).enumerate() {
        assert!(into_data(tensor).iter::<f32>().eq(full(seed + index, len)), "tensor {index} of {seed}");
    }
}

fn addresses(gathered: &[DispatchTensor]) -> Vec<usize> {
    let address = |tensor: &DispatchTensor| flex::primitive(tensor).unwrap().bytes().as_ptr().addr();
    gathered.iter().map(address).collect()
}

/// Runs `program` on one rank in each of the processes, which share a host.
fn run<T: Send>(job: &Job, program: impl Fn(&World) -> Result<T> + Sync) -> Vec<T> {
    let ends = job.run(|_, processes| launch(Launch::on_backend(processes.engine(1)), &program));
    ends.into_iter().map(|end| end.unwrap_or_else(|error| panic!("{error}")).remove(0).1).collect()
}

/// Returns the number of shared blocks that each process has created.
fn made(job: &Job) -> Vec<usize> {
    job.processes.iter().map(|processes| processes.commons.lock().blocks()).collect()
}

#[test]
fn what_is_gathered_is_there_once_and_where_it_was() {
    for processes in [2, 3] {
        let job = Job::on_one_host(processes, 3);
        let steps = run(&job, |world| {
            let mut steps = Vec::new();
            for step in 0..4 {
                let gathered = gather(world, "weights".into(), step).wait()?;
                steps.push(addresses(&gathered));
                check(gathered, step);
                world.barrier("no rank uses the result")?;
            }
            Ok(steps)
        });
        let mut made_by = vec![0; processes];
        made_by[0] = 1;
        assert_eq!(made(&job), made_by, "one block, created by the first process");
        for steps in steps {
            assert!(steps.iter().all(|addresses| *addresses == steps[0]), "{steps:?}");
        }
        let parts = 4 * LENS.iter().sum::<usize>() as u64;
        let sent: u64 = (0..processes).map(|process| job.sent(process)).sum();
        assert!(sent < parts / 10, "{sent} bytes: shards must not be sent");
    }
}

#[test]
fn who_writes_to_a_result_writes_to_its_own() {
    run(&Job::on_one_host(2, 5), |world| {
        let gathered = gather(world, "weights".into(), 7).wait()?;
        if world.rank() == 0 {
            let before = addresses(&gathered);
            let changed: Vec<_> =
                gathered.into_iter().map(|complete| Tensor::<1>::from_dispatch(complete).mul_scalar(2.0)).collect();
            world.barrier("changed")?;
            let doubled = |index: usize| full(7 + index, LENS[index]).into_iter().map(|x| 2.0 * x);
            for (index, changed) in changed.into_iter().enumerate() {
                assert_ne!(addresses(&[changed.clone().into_dispatch()])[0], before[index]);
                assert!(changed.into_data().iter::<f32>().eq(doubled(index)));
            }
        } else {
            world.barrier("changed")?;
            check(gathered, 7);
        }
        Ok(())
    });
}

/// Tries each rank as the one that waits first; the first rank of the group allocates the memory.
#[test]
fn a_deferred_call_contributes_when_another_rank_needs_it() {
    for eager in [0, 1, 2] {
        run(&Job::on_one_host(3, 7), |world| {
            let first = gather(world, Call::new("first").with_deferred(), 1);
            let second = gather(world, Call::new("second").with_deferred(), 20);
            if world.rank() == eager {
                check(second.wait()?, 20);
                world.barrier("one rank has the result")?;
            } else {
                world.barrier("one rank has the result")?;
                check(second.wait()?, 20);
            }
            check(first.wait()?, 1);
            Ok(())
        });
    }
}

#[test]
fn one_that_another_wants_before_it_is_called_begins_at_once() {
    for eager in [0, 1] {
        run(&Job::on_one_host(2, 9), |world| {
            let (all, device) = (world.all(), world.device());
            let word = || vec![Tensor::<1>::from_floats([1.0], device).into_dispatch()];
            if world.rank() == eager {
                let mut gathered = gather(world, Call::new("early").with_deferred(), 3);
                gathered.start();
                all.send("begun".into(), word(), 1 - eager, 0).wait()?;
                check(gathered.wait()?, 3);
                world.barrier("one rank has the result")?;
            } else {
                all.receive("begun".into(), None, eager, 0).wait()?;
                let gathered = gather(world, Call::new("early").with_deferred(), 3);
                world.barrier("one rank has the result")?;
                check(gathered.wait()?, 3);
            }
            Ok(())
        });
    }
}

/// Reduces several segments, by this crate's kernels and by burn's operations.
#[test]
fn sums_are_put_where_all_have_them() {
    const LEN: usize = 2_000_003;
    let job = Job::on_one_host(2, 17);
    let ops = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::premul_sum(0.5)];
    let steps = run(&job, |world| {
        let mut steps = Vec::new();
        for op in ops {
            let own = TensorData::new(values(world.rank(), LEN), [LEN]);
            let own = Tensor::<1>::from_data(own, world.device()).into_dispatch();
            let reduced = world.all().all_reduce("sums".into(), vec![own], op).wait()?;
            steps.push(addresses(&reduced));
            let [a, b] = [0, 1].map(|rank| values(rank, LEN));
            let expected = a.into_iter().zip(b).map(|(a, b)| match op {
                ReduceOp::Sum => a + b,
                ReduceOp::Max => a.max(b),
                _ => 0.5 * a + 0.5 * b,
            });
            assert!(into_data(reduced[0].clone()).iter::<f32>().eq(expected), "{op:?}");
            drop(reduced);
            world.barrier("no rank uses the result")?;
        }
        Ok(steps)
    });
    assert_eq!(made(&job), [1, 0]);
    assert!(steps.iter().all(|steps| steps.iter().all(|addresses| *addresses == steps[0])), "{steps:?}");
    // Each rank sends its half to the other, but no sums.
    let (complete, sent) = (4 * LEN as u64, job.sent(0) + job.sent(1));
    assert!(sent < ops.len() as u64 * complete * 11 / 10, "{sent} bytes");
}

#[test]
fn where_the_system_has_no_memory_in_common_parts_are_sent() {
    const LEN: usize = 1_000_003;
    let job = Job::on_one_host(3, 19);
    job.processes[0].commons.lock().exhaust();
    run(&job, |world| {
        check(gather(world, "weights".into(), 5).wait()?, 5);
        let deferred = gather(world, Call::new("deferred").with_deferred(), 6);
        world.barrier("all have called")?;
        check(deferred.wait()?, 6);
        let own = Tensor::<1>::from_data(TensorData::new(values(world.rank(), LEN), [LEN]), world.device());
        let reduced = world.all().all_reduce("sums".into(), vec![own.into_dispatch()], ReduceOp::Max).wait()?;
        let largest = |at: usize, all: &[Vec<f32>]| all.iter().map(|own| own[at]).reduce(f32::max).unwrap();
        let all: Vec<_> = (0..3).map(|rank| values(rank, LEN)).collect();
        assert!(into_data(reduced[0].clone()).iter::<f32>().eq((0..LEN).map(|at| largest(at, &all))));
        Ok(())
    });
    assert_eq!(made(&job), [0; 3]);
}

#[test]
fn a_rank_that_cannot_map_what_it_is_to_have_in_common_says_so_to_all() {
    type Collective = fn(&World) -> Result<(), CommError>;
    let collectives: [Collective; 3] = [
        |world| gather(world, "weights".into(), 5).wait().map(drop),
        |world| gather(world, Call::new("weights").with_deferred(), 5).wait().map(drop),
        |world| {
            let own = Tensor::<1>::ones([1_000_003], world.device()).into_dispatch();
            world.all().all_reduce("sums".into(), vec![own], ReduceOp::Sum).wait().map(drop)
        },
    ];
    for collective in collectives {
        let job = Job::on_one_host(2, 21);
        job.processes[1].commons.lock().exhaust();
        let ends = job.run(|_, processes| {
            launch(Launch::on_backend(processes.engine(1)), |world| {
                let error = collective(world).expect_err("one rank cannot map the memory").to_string();
                assert!(
                    error.contains("rank 0") && error.contains("shared memory of that process cannot be mapped"),
                    "{error}"
                );
                // After a failure, all operations of this world fail.
                world.barrier("after it").expect_err("the world has failed");
                Ok(())
            })
        });
        assert!(ends.iter().all(Result::is_ok), "{ends:?}");
    }
}

#[test]
fn what_no_rank_needs_is_not_gathered() {
    let job = Job::on_one_host(3, 11);
    run(&job, |world| {
        drop(gather(world, Call::new("not needed").with_deferred(), 1));
        world.barrier("all ranks have dropped the operation")
    });
    assert_eq!(made(&job), [0; 3]);
}

#[test]
fn what_one_wants_it_gets_though_others_do_not() {
    for wants in [0, 1] {
        run(&Job::on_one_host(3, 13), |world| {
            let gathered = gather(world, Call::new("of one").with_deferred(), 2);
            if world.rank() == wants {
                // The other ranks have declined the result by now.
                world.barrier("dropped")?;
                check(gathered.wait()?, 2);
            } else {
                drop(gathered);
                world.barrier("dropped")?;
            }
            world.barrier("one rank has the result")
        });
    }
}

#[test]
fn a_process_that_is_lost_before_it_has_put_what_its_rank_dropped_ends_the_others() {
    let job = Job::on_one_host(2, 23);
    let ends = job.run(|process, processes| {
        launch(Launch::on_backend(processes.engine(1)), |world| {
            let gathered = gather(world, Call::new("dropped by one").with_deferred(), 2);
            if process == 1 {
                return Ok(());
            }
            let engine = processes.state.lock().engines().next().unwrap();
            while engine.activity(1) != "finished" {
                std::thread::yield_now();
            }
            job.lose(1);
            let error = gathered.wait().expect_err("the other rank's shard never arrives");
            assert!(matches!(error, CommError::Disconnected { rank: 1, .. }), "{error}");
            Ok(())
        })
    });
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
}

#[test]
fn what_a_launch_has_not_given_back_does_not_stay_in_use() {
    let job = Job::on_one_host(2, 25);
    for launched in 0..2 {
        let ends = job.run(|process, processes| {
            launch(Launch::on_backend(processes.engine(1)), |world| {
                if process == 1 && launched == 0 {
                    return world.barrier("differs from the call of the other rank, which has allocated memory");
                }
                let gathered = gather(world, "weights".into(), 5);
                Ok(gathered.wait().map(drop)?)
            })
        });
        assert_eq!(ends.iter().all(Result::is_ok), launched == 1, "{ends:?}");
        assert_eq!(made(&job), [1, 0], "only the block of this launch");
    }
}

#[test]
fn a_deferred_call_that_is_not_begun_is_nothing_to_wait_for() {
    run(&Job::on_one_host(2, 15), |world| {
        let gathered = gather(world, Call::new("deferred").with_deferred(), 4);
        world.barrier("all have called")?;
        assert!(gathered.is_complete(), "it waits only for being requested");
        world.barrier("no rank requests it before this")?;
        check(gathered.wait()?, 4);
        Ok(())
    });
}
