//! Ranks with different numbers of batches, and parameters that only some ranks use.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::Linear;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, World, launch};
use burn_dtensor::fsdp::{FullyShard, ParamError, full_model, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::replicate::{DataParallel, Join, JoinError, JoinedBatch, replicate};
use burn_dtensor::{Error, Result};

use crate::fsdp::collective_counts::{Stack, WIDTH, stack};
use crate::fsdp::support::{max_diff, on_device, tensor, values};
use crate::launched;

/// Rank r has `1 + 2 r` batches.
fn batches(rank: usize, device: &Device) -> Vec<Tensor<2>> {
    (0..1 + 2 * rank)
        .map(|step| tensor((10 * step + rank) as u64, [2, WIDTH], device))
        .collect()
}

/// One process on the batches that the ranks have in each step. `divisor` is that of a step by its
/// number of batches.
fn on_one_device(
    start: &Stack,
    ranks: usize,
    divisor: impl Fn(usize) -> usize,
) -> BTreeMap<String, Vec<f32>> {
    let device = Device::flex().autodiff();
    let mut model = on_device(start, &device);
    let mut optim = SgdConfig::new().init();
    for step in 0..2 * ranks - 1 {
        let of_step = (0..ranks).filter_map(|rank| batches(rank, &device).get(step).cloned());
        let of_step: Vec<_> = of_step.collect();
        let count = of_step.len();
        let loss = model.forward(Tensor::cat(of_step, 0)).square().sum() / divisor(count) as f64;
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    values(&model, None)
}

fn joined(
    world: &World,
    start: &Stack,
    shards: bool,
    of_all: bool,
) -> Result<(BTreeMap<String, Vec<f32>>, usize)> {
    let device = world.device().clone().autodiff();
    let mesh = DeviceMesh::new(world, [world.size()], ["dp"])?;
    let model = on_device(start, &device);
    let mut model = match shards {
        false => replicate(model, &mesh, DataParallel::new())?,
        true => fully_shard(model, &mesh, FullyShard::new().with_units(["blocks.*"]))?,
    };
    let mut optim = SgdConfig::new().init();
    let mut join = Join::new(&mesh);
    if of_all {
        join = join.with_divisor_of_all();
    }
    let mut own = batches(world.rank(), &device).into_iter();
    let mut steps = 0;
    while let Some(JoinedBatch { batch, weight }) = join.next(own.next())? {
        let loss = model.forward(batch).square().sum() * weight;
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
        steps += 1;
    }
    Ok((values(&full_model(&model)?, None), steps))
}

#[test]
fn ranks_that_run_out_step_with_the_others() {
    let start = stack(&Device::flex());
    for ranks in [2, 3] {
        for (shards, of_all) in [(false, false), (false, true), (true, false)] {
            let divisor = |active: usize| if of_all { ranks } else { active };
            let expected = on_one_device(&start, ranks, divisor);
            let program = |world: &World| joined(world, &start, shards, of_all);
            let results = launched::values(launch(Launch::threads(ranks), program).unwrap());
            for (found, steps) in &results {
                assert_eq!(*steps, 2 * ranks - 1);
                assert_eq!(found, &results[0].0);
                let diff = max_diff(found, &expected);
                assert!(
                    diff < 1e-6,
                    "{ranks} ranks, shards {shards}, divided by all {of_all}: {diff}"
                );
            }
        }
    }
}

#[test]
fn an_early_end_and_a_rank_without_batches_are_told_to_every_rank() {
    let refused = |counts: [usize; 3], refuses: bool| {
        let results = launch(Launch::threads(3), |world| {
            let mesh = DeviceMesh::new(world, [3], ["dp"])?;
            let mut join = Join::new(&mesh);
            if refuses {
                join = join.with_early_end_refused();
            }
            let mut own = 0..counts[world.rank()];
            loop {
                match join.next(own.next()) {
                    Ok(Some(_)) => {}
                    Ok(None) => return Ok(None),
                    Err(Error::Join(error)) => return Ok(Some(error)),
                    Err(error) => return Err(error),
                }
            }
        });
        let mut results = launched::values(results.unwrap());
        assert!(results.iter().all(|other| *other == results[0]));
        results.remove(0)
    };
    assert_eq!(refused([2, 2, 2], true), None);
    assert_eq!(refused([2, 1, 3], false), None);
    let early = JoinError::EarlyEnd {
        ended: vec![1],
        batches: 1,
    };
    assert_eq!(refused([2, 1, 3], true), Some(early));
    let without = JoinError::NoBatch { ranks: vec![0, 2] };
    assert!(without.to_string().contains("at least one"));
    for refuses in [false, true] {
        assert_eq!(refused([0, 1, 0], refuses), Some(without.clone()));
    }
}

#[derive(Module, Debug)]
struct Branches {
    left: Linear,
    right: Linear,
}

/// Each rank takes the branches that it is given.
fn gradients(world: &World, refuses: bool, takes: [[bool; 2]; 2]) -> Result<Vec<String>> {
    let device = world.device().clone().autodiff();
    let mesh = DeviceMesh::new(world, [2], ["dp"])?;
    let linear = |seed| Linear {
        weight: burn::module::Param::from_tensor(tensor(seed, [3, 3], &device).require_grad()),
        bias: None,
    };
    let model = Branches {
        left: linear(1),
        right: linear(2),
    };
    let config = DataParallel::new().with_one_unit();
    let config = config.with_unused_parameters_refused(refuses);
    let model = replicate(model, &mesh, config)?;
    let [left, right] = takes[world.rank()];
    let x = tensor(world.rank() as u64, [2, 3], &device);
    let loss = unit(&model, x, |model, x| {
        let mut loss = x.clone().sum() * 0.0;
        if left {
            loss = loss + model.left.forward(x.clone()).sum();
        }
        if right {
            loss = loss + model.right.forward(x).sum();
        }
        loss
    });
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let with =
        |name: &str, layer: &Linear| grads.get::<2>(layer.weight.id).map(|_| name.to_owned());
    Ok([with("left", &model.left), with("right", &model.right)]
        .into_iter()
        .flatten()
        .collect())
}

#[test]
fn unused_parameters_are_zeros_or_are_named_by_rank_on_every_rank() {
    let (one, none) = ([[true, false], [true, true]], [[true, false]; 2]);
    let allowed = |takes| {
        let program = |world: &World| gradients(world, false, takes);
        launched::values(launch(Launch::threads(2), program).unwrap())
    };
    assert_eq!(allowed(one), [["left", "right"]; 2]);
    assert_eq!(allowed(none), [["left"]; 2], "as without replication");
    let refused = |takes| {
        let program = |world: &World| gradients(world, true, takes);
        let ranks = launch(Launch::threads(2), program);
        ranks.map(launched::values).map_err(Box::new)
    };
    assert_eq!(refused([[true; 2]; 2]).unwrap(), [["left", "right"]; 2]);
    let right = || vec!["right.weight".to_owned()];
    for (takes, expected) in [
        (one, vec![(0, right())]),
        (none, vec![(0, right()), (1, right())]),
    ] {
        let error = refused(takes).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("same error"), "on both ranks: {text}");
        let Error::Param(ParamError::Unused { unused }) = error.cause else {
            panic!("{text}")
        };
        assert_eq!(unused, expected);
    }
}
