//! Prefetched units: by the program, by their order in forward, and by `unshard`.

use std::collections::BTreeMap;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, Op, Phase, launch};
use burn_dtensor::fsdp::{
    Event, EventKind, FsdpModule, ReshardAfterForward, full_model, record_events, unit, unshard,
};
use burn_dtensor::{Error, Result};

use super::collective_counts::{BLOCKS, Stack, WIDTH, stack};
use super::params_outside_unit;
use super::runtime_options::sharded;
use super::support::{Holder, max_diff, on_device, tensor, values};

fn count(events: &[Event], kind: EventKind) -> usize {
    events.iter().filter(|event| event.kind == kind).count()
}

const RANKS: usize = 2;
const STEPS: u64 = 4;
const RATE: f64 = 0.05;

/// Numbers of blocks that the two batches of a step run. The second one runs without the last block, which
/// is then prefetched in vain, yet the step changes its weights.
const BATCHES: [usize; 2] = [BLOCKS, BLOCKS - 1];

fn loss(model: &Stack, blocks: usize, step: u64, rank: usize, device: &Device) -> Tensor<1> {
    let seed = 100 * step + 10 * blocks as u64 + rank as u64;
    let output = unit(model, tensor(seed, [2, WIDTH], device), |model, x| {
        let blocks = &model.blocks[..blocks];
        blocks.iter().fold(model.first.forward(x), |x, block| {
            unit(block, x, |block, x| block.forward(x).tanh())
        })
    });
    output.square().sum()
}

/// The weights after each step on one device.
fn trained_alone(model: &Stack) -> Vec<BTreeMap<String, Vec<f32>>> {
    let device = Device::flex().autodiff();
    let (mut model, mut optim) = (on_device(model, &device), SgdConfig::new().init());
    let mut weights = Vec::new();
    for step in 0..STEPS {
        let of_rank = |rank| BATCHES.map(|blocks| loss(&model, blocks, step, rank, &device));
        let sum = (0..RANKS).flat_map(of_rank).reduce(|a, b| a + b);
        let mean = sum.expect("there are ranks") / RANKS as f32;
        let grads = GradientsParams::from_grads(mean.backward(), &model);
        model = optim.step(RATE, model, grads);
        weights.push(values(&model, None));
    }
    weights
}

/// Any order of units, some of them never entered, from the second step: no copy is left that a
/// step has made stale.
#[test]
fn whatever_is_prefetched_values_are_the_same() {
    let model = stack(&Device::flex());
    let expected = trained_alone(&model);
    for (reshard, backward) in [
        (ReshardAfterForward::Always, BLOCKS + 1),
        (ReshardAfterForward::Never, 0),
    ] {
        for next in [vec![1, 2], vec![2], vec![2, 1, 0], vec![0]] {
            launch(Launch::threads(RANKS), |world| {
                let device = world.device().clone().autodiff();
                let mut model = sharded(world, &model, reshard)?;
                let mut optim = SgdConfig::new().init();
                for (step, expected) in (0..).zip(&expected) {
                    if step == 1 {
                        let blocks = next.iter().map(|&at| FsdpModule::of(&model.blocks[at]));
                        let blocks = blocks.collect::<Result<Vec<_>>>()?;
                        let units = FsdpModule::of(&model)?;
                        units.set_backward_prefetch(blocks.clone());
                        units.own().set_forward_prefetch(blocks);
                    }
                    let mut sum = GradientsAccumulator::new();
                    for blocks in BATCHES {
                        let (grads, events) = record_events(|| {
                            loss(&model, blocks, step, world.rank(), &device).backward()
                        });
                        sum.accumulate(&model, GradientsParams::from_grads(grads, &model));
                        let gathers = count(&events, EventKind::Unshard);
                        let all = BLOCKS + 1 + backward;
                        assert!(
                            blocks < BLOCKS || gathers == all,
                            "{gathers} of {all}, {reshard:?}, {next:?}, step {step}"
                        );
                    }
                    model = optim.step(RATE, model, sum.grads());
                    let diff = max_diff(&values(&full_model(&model)?, None), expected);
                    assert!(
                        diff < 1e-5,
                        "off by {diff}, {reshard:?}, {next:?}, step {step}"
                    );
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn what_was_prefetched_in_vain_is_dropped_with_forward() {
    let model = stack(&Device::flex());
    launch(Launch::threads(2), |world| {
        let model = sharded(world, &model, ReshardAfterForward::Always)?;
        FsdpModule::of(&model)?
            .own()
            .set_forward_prefetch([FsdpModule::of(&model.blocks[2])?]);
        let device = world.device().clone().autodiff();
        let only_first = || {
            unit(&model, tensor(1, [2, WIDTH], &device), |model, x| {
                model.first.forward(x)
            })
        };
        for _ in 0..2 {
            let (output, events) = record_events(only_first);
            assert_eq!(
                count(&events, EventKind::Unshard),
                2,
                "of the root, and of a block in vain, each time"
            );
            drop(output.sum().backward());
        }
        // What the program itself has gathered stays until it is used.
        unshard(&model.blocks[2])?.wait()?;
        let (_, events) = record_events(only_first);
        assert_eq!(count(&events, EventKind::Unshard), 1);
        Ok(())
    })
    .unwrap();
}

/// Once the units' order is known, from a forward: the late rank has posted all that others need
/// for the next.
#[test]
fn a_rank_that_is_late_in_forward_holds_up_no_other() {
    let model = stack(&Device::flex());
    let (is_through, wait_until) = mpsc::channel();
    let (is_through, wait_until) = (Mutex::new(is_through), Mutex::new(wait_until));
    launch(
        Launch::threads(2).with_deadline(Duration::from_secs(20)),
        |world| {
            let model = sharded(world, &model, ReshardAfterForward::Always)?;
            let x = || {
                tensor(
                    world.rank() as u64 + 1,
                    [2, WIDTH],
                    &world.device().clone().autodiff(),
                )
            };
            drop(model.forward(x()).sum().backward());
            // In the root's forward, before any block: until the other rank is through with all of
            // them.
            let output = unit(&model, x(), |model, x| {
                if world.rank() == 1 {
                    wait_until
                        .lock()
                        .unwrap()
                        .recv_timeout(Duration::from_secs(20))
                        .map_err(Error::other)?;
                }
                let x = model
                    .blocks
                    .iter()
                    .fold(model.first.forward(x), |x, block| {
                        unit(block, x, |block, x| block.forward(x).tanh())
                    });
                Ok::<_, Error>(x)
            })?;
            if world.rank() == 0 {
                is_through.lock().unwrap().send(()).unwrap();
            }
            let mut grads = GradientsParams::from_grads(output.sum().backward(), &model);
            values(
                &full_model(&model.clone().map(&mut Holder(&mut grads)))?,
                None,
            );
            Ok(())
        },
    )
    .unwrap();
}

#[test]
fn units_that_follow_each_other_in_a_circle_are_posted_once() {
    let model = stack(&Device::flex());
    for ranks in [1, 2] {
        launch(Launch::threads(ranks), |world| {
            let model = sharded(world, &model, ReshardAfterForward::Always)?;
            let gathers = || {
                let before = world.ledger().calls(Op::AllGather);
                let x = tensor(1, [2, WIDTH], &world.device().clone().autodiff());
                let output = unit(&model, x, |model, x| {
                    let blocks = [0, 1, 0].map(|at| &model.blocks[at]);
                    blocks.into_iter().fold(x, |x, block| {
                        unit(block, x, |block, x| block.forward(x).tanh())
                    })
                });
                let gathers = world.ledger().calls_in(Op::AllGather, Phase::Forward);
                drop(output);
                (gathers, world.ledger().calls(Op::AllGather) - before)
            };
            let first = gathers();
            let second = gathers();
            assert_eq!(second.1, first.1, "as many as before the order was known");
            assert_eq!(second.0, 2 * first.0);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn another_clones_read_leaves_a_prefetch_alone() {
    params_outside_unit::sharded(
        |net| net,
        params_outside_unit::config,
        |world, net, _| {
            let teacher = net.clone().no_grad();
            let gathers = || world.ledger().calls(Op::AllGather);
            unshard(&net.blocks[0])?.wait()?;
            let _ = teacher.blocks[0].weight.val();
            let before = gathers();
            let _ = unit(&net.blocks[0], params_outside_unit::x(world), |block, x| {
                block.forward(x)
            });
            assert_eq!(
                gathers(),
                before,
                "the student reads what was gathered ahead"
            );
            unshard(&net.blocks[0])?.wait()?;
            let (before, _) = (gathers(), full_model(&teacher)?);
            let between = gathers();
            let _ = unit(&net.blocks[0], params_outside_unit::x(world), |block, x| {
                block.forward(x)
            });
            assert_eq!((between - before, gathers() - between), (3, 0));
            Ok(())
        },
    );
}
