//! Prefetched units: by the program, by their order in forward, and by `unshard`.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn_dtensor::comm::{Launch, Op, Phase, launch};
use burn_dtensor::fsdp::{
    Event, EventKind, FsdpModule, ReshardAfterForward, full_model, record_events, unit, unshard,
};
use burn_dtensor::{Error, Result};

use super::collective_counts::{BLOCKS, WIDTH, stack};
use super::params_outside_unit;
use super::runtime_options::{sharded, step};
use super::support::{Holder, tensor, values};

fn count(events: &[Event], kind: EventKind) -> usize {
    events.iter().filter(|event| event.kind == kind).count()
}

/// Any order of units, some of them never entered: the same values, and nothing is left.
#[test]
fn whatever_is_prefetched_values_are_the_same() {
    let model = stack(&Device::flex());
    for reshard in [ReshardAfterForward::Always, ReshardAfterForward::Never] {
        for next in [vec![1, 2], vec![2], vec![2, 1, 0], vec![0]] {
            launch(Launch::threads(2), |world| {
                let model = sharded(world, &model, reshard)?;
                let (expected, _) = step(world, &model, || Ok(()))?;
                let blocks = next
                    .iter()
                    .map(|&at| FsdpModule::of(&model.blocks[at]))
                    .collect::<Result<Vec<_>>>()?;
                FsdpModule::of(&model)?
                    .own()
                    .set_forward_prefetch(blocks.clone());
                FsdpModule::of(&model)?.set_backward_prefetch(blocks);
                for _ in 0..2 {
                    let (result, events) = record_events(|| step(world, &model, || Ok(())));
                    assert_eq!(result?.0, expected, "{reshard:?}, {next:?}");
                    let forward = BLOCKS + 1;
                    let backward = if reshard == ReshardAfterForward::Never {
                        0
                    } else {
                        forward
                    };
                    // To compare gradients they are gathered as parameters are.
                    let all = forward + backward + forward;
                    assert_eq!(
                        count(&events, EventKind::Unshard),
                        all,
                        "{reshard:?}, {next:?}"
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
