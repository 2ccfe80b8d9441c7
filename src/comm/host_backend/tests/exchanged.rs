//! Collectives whose tensors the ranks exchange by their data plane, on its test double.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Distribution, Tensor};
use parking_lot::Mutex;

use super::super::{HostBackend, ProcessJob};
use crate::comm::backend::Backend;
use crate::comm::data::double::{DoublePlane, Step};
use crate::comm::{CommError, Launch, ReduceOp, World, launch};
use crate::dtensor::ops::random;
use crate::fsdp::{FullyShard, fully_shard, unit};
use crate::mesh::DeviceMesh;
use crate::optim::sharded;
use crate::testing::{Conformance, LoopbackJob};
use crate::{Error, Result};

/// Time after which a rank that waits for one that never starts an exchange fails.
const FAR: Duration = Duration::from_secs(60);

/// Returns the configuration of a launch of `ranks` ranks of this process on `double`.
fn threads(ranks: usize, double: &Arc<DoublePlane>) -> Launch {
    Launch::on_backend(HostBackend::on_double(ranks, double)).with_deadline(FAR)
}

/// Returns the configuration of a launch of `each` ranks in this simulated process on `double`.
fn process(job: &ProcessJob, each: usize, double: DoublePlane) -> Launch {
    let backend = job.backend(each);
    let double = Arc::new(double);
    for other in job.state.lock().backends() {
        if other.launch_id() == backend.launch_id() {
            other.planes.use_double(double.clone());
        }
    }
    Launch::on_backend(backend)
}

fn double() -> Arc<DoublePlane> {
    Arc::new(DoublePlane::new())
}

/// Waits until all memory of exchanges is free: the completion thread drops what ranks gave up.
fn assert_free(double: &DoublePlane) {
    let is_free = |_| {
        thread::yield_now();
        double.open_exchanges() == 0
    };
    assert!((0..10_000_000).any(is_free), "an exchange keeps its memory");
}

#[test]
fn ranks_of_one_process_conform() {
    let doubles = Mutex::new(Vec::new());
    let launch = |ranks| {
        doubles.lock().push(double());
        threads(ranks, doubles.lock().last().expect("was added"))
    };
    let report = Conformance::of(launch)
        .with_ranks([2, 3])
        .with_few_cases()
        .run();
    assert!(report.total() > 1000, "{report}");
    for double in doubles.lock().iter() {
        assert_free(double);
    }
}

#[test]
fn two_processes_conform() {
    for (each, seed) in [(1, 41), (2, 42)] {
        let reports = LoopbackJob::new(2, seed).run(|_, job| {
            Conformance::of(|_| process(job, each, DoublePlane::new()))
                .with_ranks([2 * each])
                .with_few_cases()
                .run()
        });
        for report in reports {
            assert!(report.total() > 1000, "{report}");
        }
    }
}

/// Returns true if every value of an all-reduce and of an all-gather is right, over two rounds.
fn are_right(world: &World) -> Result<bool> {
    let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
    let rank = world.rank() as f32;
    let mut right = true;
    for round in 0..2 {
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

#[test]
fn a_forgotten_step_gives_wrong_values() {
    for forgotten in [None].into_iter().chain(Step::ALL.map(Some)) {
        let double = || DoublePlane::new().with_forgotten(forgotten);
        let right = launch(threads(2, &Arc::new(double())), are_right).unwrap();
        let processes = LoopbackJob::new(2, 43)
            .run(|_, job| launch(process(job, 1, double()), are_right).unwrap());
        for right in [right].into_iter().chain(processes) {
            assert!(
                right.iter().all(|(_, right)| *right == forgotten.is_none()),
                "{forgotten:?}: {right:?}"
            );
        }
    }
}

#[test]
fn a_rank_that_drops_its_request_still_takes_part() {
    let double = double();
    let sums = launch(threads(3, &double), |world| {
        let sum = |value: f32| {
            let tensor = Tensor::<1>::full([3], value, world.device()).into_dispatch();
            world
                .all()
                .all_reduce("sum".into(), vec![tensor], ReduceOp::Sum)
        };
        if world.rank() == 1 {
            drop(sum(10.0));
            return Ok(None);
        }
        let sum = sum(1.0).wait()?.remove(0);
        let sum = Tensor::<1>::from_dispatch(sum).into_data();
        Ok(sum.iter::<f32>().next())
    });
    let sums: Vec<_> = sums.unwrap().into_iter().map(|(_, sum)| sum).collect();
    assert_eq!(sums, [Some(12.0), None, Some(12.0)]);
    assert_free(&double);
    assert_eq!(double.aborts(), 0);
}

#[test]
fn a_rank_that_cannot_start_an_exchange_fails_the_world() {
    let double = Arc::new(DoublePlane::new().with_lost(1));
    // Rank 1 drops its request, so only the completion thread sees that its exchange fails. Rank 0
    // waits for it inside the plane.
    let error = launch(threads(2, &double), |world| {
        let work = world.all().barrier("exchanged".into());
        if world.rank() == 0 {
            work.wait()?;
        }
        Ok(())
    });
    let cause = error.unwrap_err().cause;
    let Error::Comm(CommError::DataPlane {
        rank,
        plane,
        problem,
    }) = &cause
    else {
        panic!("{cause}")
    };
    assert_eq!(
        (*rank, &plane[..], &problem[..]),
        (1, "double", "the device is lost")
    );
    assert_eq!(double.aborts(), 1);
}

/// Returns the bits of the losses of each rank over a few steps.
fn losses(launched: Launch) -> Vec<(usize, Vec<u32>)> {
    launch(launched, |world| {
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
            losses.push(loss.clone().into_scalar::<f32>().to_bits());
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            net = optim.step(0.1, net, grads)?;
        }
        assert!(net.num_params() > 0);
        Ok(losses)
    })
    .unwrap()
}

#[test]
fn sharded_training_has_the_same_losses() {
    for ranks in [2, 3] {
        let double = double();
        assert_eq!(
            losses(threads(ranks, &double)),
            losses(Launch::threads(ranks))
        );
        assert_free(&double);
    }
}
