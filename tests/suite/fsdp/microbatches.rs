//! A stage of a pipeline: several of its forwards are open before the first backward (1F1B), and
//! all of them compute with weights that were gathered once.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, Op, World, launch};
use burn_dtensor::fsdp::{
    FsdpModule, FullyShard, ReshardAfterForward, full_model, fully_shard, unit, unshard,
};
use burn_dtensor::mesh::DeviceMesh;

use super::collective_counts::{BLOCKS, Stack, WIDTH, stack};
use super::support::{Holder, max_diff, mean, on_device, tensor, values};
use crate::launched;

const UNITS: u64 = BLOCKS as u64 + 1;
const MICROBATCHES: u64 = 4;
const STEPS: u64 = 10;
const LR: f64 = 1e-2;

/// What a stage does next, with which microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Forward(u64),
    Backward(u64),
}

/// One forward, one backward, with so many forwards more at the start.
fn one_forward_one_backward(warmup: u64) -> Vec<Turn> {
    let backwards = (0..MICROBATCHES).map(Turn::Backward);
    let mut turns: Vec<_> = (0..warmup).map(Turn::Forward).collect();
    for (at, backward) in backwards.enumerate() {
        turns.extend(
            (warmup + at as u64..MICROBATCHES)
                .take(1)
                .map(Turn::Forward),
        );
        turns.push(backward);
    }
    turns
}

/// Gradients of one step, added up over its microbatches; `before` each turn.
fn step(
    model: &Stack,
    (rank, number): (usize, u64),
    turns: &[Turn],
    mut before: impl FnMut(Turn) -> Result<()>,
) -> Result<GradientsParams> {
    let device = &model.devices()[0];
    let mut open = BTreeMap::new();
    let mut sum = GradientsAccumulator::new();
    for &turn in turns {
        before(turn)?;
        match turn {
            Turn::Forward(at) => {
                let seed = (number * MICROBATCHES + at) * 10 + rank as u64 + 1;
                let loss = model
                    .forward(tensor(seed, [2, WIDTH], device))
                    .square()
                    .sum();
                open.insert(at, loss);
            }
            Turn::Backward(at) => {
                let loss: Tensor<1> = open.remove(&at).expect("forward comes first");
                sum.accumulate(model, GradientsParams::from_grads(loss.backward(), model));
            }
        }
    }
    Ok(sum.grads())
}

/// A stage whose weights stay from the first forward to the last backward, and whose gradients are
/// reduced there.
fn staged(model: &Stack, turn: Turn) -> Result<()> {
    let units = FsdpModule::of(model)?;
    match turn {
        Turn::Forward(0) => units.set_reshard_after_backward(false),
        Turn::Backward(at) => {
            let is_last = at + 1 == MICROBATCHES;
            units.set_requires_gradient_sync(is_last);
            units.set_reshard_after_backward(is_last);
        }
        Turn::Forward(_) => {}
    }
    Ok(())
}

fn mesh(world: &World, replicas: usize) -> Result<DeviceMesh> {
    match replicas {
        1 => DeviceMesh::new(world, [world.size()], ["shard"]),
        _ => DeviceMesh::new(
            world,
            [replicas, world.size() / replicas],
            ["replicate", "shard"],
        ),
    }
}

fn sharded(model: &Stack, world: &World, replicas: usize) -> Result<Stack> {
    let device = world.device().clone().autodiff();
    let config = FullyShard::new()
        .with_units(["blocks.*"])
        .with_reshard_after_forward(ReshardAfterForward::Never);
    fully_shard(on_device(model, &device), &mesh(world, replicas)?, config)
}

/// All units of a model begin to be gathered.
fn unshard_all(model: &Stack) -> Result<()> {
    drop(unshard(model)?);
    model
        .blocks
        .iter()
        .try_for_each(|block| unshard(block).map(drop))
}

#[test]
fn microbatches_in_turns_train_as_one_after_the_other() {
    let (plain, in_order) = (stack(&Device::flex()), one_forward_one_backward(0));
    assert_eq!(
        in_order[..3],
        [Turn::Forward(0), Turn::Backward(0), Turn::Forward(1)]
    );
    for (ranks, replicas) in [(1, 1), (2, 1), (3, 1), (4, 2)] {
        for (warmup, early) in [(1, true), (2, false), (MICROBATCHES, true)] {
            let turns = one_forward_one_backward(warmup);
            let trained = launch(Launch::threads(ranks), |world| {
                let (mut model, mut other) = (
                    sharded(&plain, world, replicas)?,
                    sharded(&plain, world, replicas)?,
                );
                let (mut optim, mut other_optim) =
                    (AdamWConfig::new().init(), AdamWConfig::new().init());
                for number in 0..STEPS {
                    world.ledger().reset();
                    if early {
                        unshard_all(&model)?;
                    }
                    let grads = step(&model, (world.rank(), number), &turns, |turn| {
                        staged(&model, turn)
                    })?;
                    let calls = |op| world.ledger().calls(op);
                    let once = if ranks == 1 { 0 } else { UNITS };
                    assert_eq!(
                        (calls(Op::AllGather), calls(Op::ReduceScatter)),
                        (once, once),
                        "step {number}"
                    );
                    model = optim.step(LR, model, grads);

                    let held_back = |turn| {
                        let is_last = turn == Turn::Backward(MICROBATCHES - 1);
                        FsdpModule::of(&other)?.set_requires_gradient_sync(is_last);
                        Ok(())
                    };
                    let grads = step(&other, (world.rank(), number), &in_order, held_back)?;
                    other = other_optim.step(LR, other, grads);
                }
                Ok((
                    values(&full_model(&model)?, None),
                    values(&full_model(&other)?, None),
                ))
            });
            for (model, other) in launched::values(trained.unwrap()) {
                assert_eq!(model, other, "{ranks} ranks, {warmup} forwards ahead");
            }
        }
    }
}

#[test]
fn gradients_are_those_of_the_unsharded_model() {
    let turns = one_forward_one_backward(2);
    let model = stack(&Device::flex());
    let plain = on_device(&model, &Device::flex().autodiff());
    let of_rank = |rank| {
        values(
            &plain,
            Some(&step(&plain, (rank, 0), &turns, |_| Ok(())).unwrap()),
        )
    };
    let expected = mean((0..3).map(of_rank).collect::<Vec<_>>().iter());
    let grads = launch(Launch::threads(3), |world| {
        let model = sharded(&model, world, 1)?;
        let mut grads = step(&model, (world.rank(), 0), &turns, |turn| {
            staged(&model, turn)
        })?;
        Ok(values(
            &full_model(&model.map(&mut Holder(&mut grads)))?,
            None,
        ))
    });
    for grads in launched::values(grads.unwrap()) {
        let diff = max_diff(&grads, &expected);
        assert!(diff < 1e-5, "{diff}");
    }
}

/// Three forwards share weights when they are freed: these are gathered once for all three, and
/// once for a fourth.
#[test]
fn weights_that_are_shared_are_freed_by_hand() {
    let (plain, turns) = (stack(&Device::flex()), one_forward_one_backward(2));
    let (freed, gathers) = (Turn::Backward(0), [UNITS; 3]);
    let grads = launch(Launch::threads(2), |world| {
        let model = sharded(&plain, world, 1)?;
        let run = |is_freed: bool| -> Result<_> {
            world.ledger().reset();
            let mut grads = step(&model, (world.rank(), 0), &turns, |turn| {
                if is_freed && turn == freed {
                    FsdpModule::of(&model)?.reshard();
                }
                staged(&model, turn)
            })?;
            let calls = world.ledger().calls(Op::AllGather);
            Ok((
                calls,
                values(
                    &full_model(&model.clone().map(&mut Holder(&mut grads)))?,
                    None,
                ),
            ))
        };
        Ok((run(false)?, run(true)?))
    });
    for ((kept_calls, kept), (freed_calls, freed)) in launched::values(grads.unwrap()) {
        assert_eq!(
            (kept_calls, freed_calls),
            (gathers[0], gathers.iter().sum())
        );
        assert_eq!(kept, freed);
    }
}

/// What is shared has the values of its own shards alone.
#[test]
fn stepped_shards_are_gathered_again() {
    launch(Launch::threads(2), |world| {
        let model = sharded(&stack(&Device::flex()), world, 1)?;
        FsdpModule::of(&model)?.set_reshard_after_backward(false);
        let device = world.device().clone().autodiff();
        let x = || tensor(1, [2, WIDTH], &device);
        let kept = model.forward(x());
        let stepped = model.clone().map(&mut super::support::Shift);
        world.ledger().reset();
        let other = stepped.forward(x());
        assert_eq!(world.ledger().calls(Op::AllGather), UNITS);
        let again = model.forward(x());
        let difference =
            |a: &Tensor<2>, b: &Tensor<2>| (a.clone() - b.clone()).abs().max().into_scalar::<f32>();
        assert!(difference(&kept, &again) == 0.0 && difference(&kept, &other) > 0.0);
        Ok(())
    })
    .unwrap();
}

/// One that the program keeps is gathered for it by any of the passes that are open.
#[test]
fn a_weight_that_was_shared_and_freed_can_still_be_read() {
    let plain = stack(&Device::flex());
    let read = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let model = sharded(&plain, world, 1)?;
        FsdpModule::of(&model)?.set_reshard_after_backward(false);
        let forward = |seed| model.forward(tensor(seed, [2, WIDTH], &device)).sum();
        let first = forward(1);
        let (second, kept) = unit(
            &model.blocks[0],
            tensor(2, [2, WIDTH], &device),
            |block, x| {
                let kept = block.weight.val();
                (block.forward(x), kept.inner())
            },
        );
        drop(first.backward());
        FsdpModule::of(&model)?.reshard();
        let kept = kept.into_data().try_to_vec::<f32>().expect("it is there");
        drop(second.sum().backward());
        Ok(kept)
    });
    let expected = plain.blocks[0]
        .weight
        .val()
        .into_data()
        .try_to_vec::<f32>()
        .unwrap();
    assert!(
        launched::values(read.unwrap())
            .iter()
            .all(|kept| *kept == expected)
    );
}
