//! What the program has units do between passes.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, Op, Phase, World, launch};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{
    FsdpModule, FullyShard, ReshardAfterForward, full_model, fully_shard, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::{Error, Result};

use super::collective_counts::{BLOCKS, Stack, WIDTH, stack};
use super::hook::in_backward;
use super::support::{Holder, max_diff, mean, on_device, tensor, values};
use crate::launched;

const ALL: u64 = BLOCKS as u64 + 1;

pub fn sharded(world: &World, model: &Stack, reshard: ReshardAfterForward) -> Result<Stack> {
    let device = world.device().clone().autodiff();
    let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
    fully_shard(
        on_device(model, &device),
        &mesh,
        FullyShard::new()
            .with_units(["blocks.*"])
            .with_reshard_after_forward(reshard),
    )
}

/// The gradients of one batch, whole, and how many all-gathers its backward has made; `between`
/// forward and backward.
pub fn step(
    world: &World,
    model: &Stack,
    between: impl FnOnce() -> Result<()>,
) -> Result<(std::collections::BTreeMap<String, Vec<f32>>, u64)> {
    let device = world.device().clone().autodiff();
    let loss = model
        .forward(tensor(world.rank() as u64 + 1, [2, WIDTH], &device))
        .square()
        .sum();
    between()?;
    let before = world.ledger().calls_in(Op::AllGather, Phase::Backward);
    let mut grads = GradientsParams::from_grads(loss.backward(), model);
    let gathers = world.ledger().calls_in(Op::AllGather, Phase::Backward) - before;
    Ok((
        values(
            &full_model(&model.clone().map(&mut Holder(&mut grads)))?,
            None,
        ),
        gathers,
    ))
}

#[test]
fn what_forward_keeps_is_freed_by_hand_and_gathered_again() {
    let model = stack(&Device::flex());
    for reshard in [
        ReshardAfterForward::Never,
        ReshardAfterForward::Auto,
        ReshardAfterForward::Always,
    ] {
        for checkpointing in [false, true] {
            launch(Launch::threads(2), |world| {
                let device = world.device().clone().autodiff();
                let device = if checkpointing {
                    device.gradient_checkpointing()
                } else {
                    device
                };
                let model = sharded(world, &on_device(&model, &device), reshard)?;
                let (expected, kept) = step(world, &model, || Ok(()))?;
                let (grads, gathers) = step(world, &model, || {
                    FsdpModule::of(&model)?.reshard();
                    Ok(())
                })?;
                assert_eq!(grads, expected, "{reshard:?}");
                assert_eq!(gathers, ALL, "{reshard:?}; kept: {kept}");
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn another_reshard_mode_at_run_time() {
    let model = stack(&Device::flex());
    // Told to all units, or to the root alone.
    for (from, to, all, root) in [
        (
            ReshardAfterForward::Never,
            ReshardAfterForward::Always,
            ALL,
            1,
        ),
        (
            ReshardAfterForward::Always,
            ReshardAfterForward::Never,
            0,
            ALL - 1,
        ),
        (
            ReshardAfterForward::Auto,
            ReshardAfterForward::Always,
            ALL,
            ALL,
        ),
        (
            ReshardAfterForward::Always,
            ReshardAfterForward::Ranks(1),
            0,
            ALL - 1,
        ),
    ] {
        launch(Launch::threads(2), |world| {
            for (recursive, expected) in [(true, all), (false, root)] {
                let model = sharded(world, &model, from)?;
                let units = FsdpModule::of(&model)?;
                if recursive { units } else { units.own() }.set_reshard_after_forward(to)?;
                let (_, gathers) = step(world, &model, || Ok(()))?;
                assert_eq!(gathers, expected, "{from:?} to {to:?}, all {recursive}");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn groups_that_were_not_made_are_told() {
    launch(Launch::threads(4), |world| {
        let model = sharded(world, &stack(&Device::flex()), ReshardAfterForward::Always)?;
        let error = FsdpModule::of(&model)?.set_reshard_after_forward(ReshardAfterForward::Ranks(2)).unwrap_err();
        assert!(
            matches!(&error, Error::Param(ParamError::ReshardRanks { ranks: 2, unit }) if unit == "root"),
            "{error}"
        );
        for factor in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e39, 1e38, 1e-39] {
            let error = FsdpModule::of(&model)?.set_gradient_divide_factor(factor).unwrap_err();
            assert!(matches!(error, Error::Param(ParamError::DivideFactor { .. })), "{error}");
        }
        let error = FsdpModule::of(&model)?.matching(["blocks.7"]).unwrap_err();
        assert!(error.to_string().contains("blocks.0"), "{error}");
        assert_eq!(FsdpModule::of(&model)?.matching(["blocks.[12]"])?.paths(), ["blocks.1", "blocks.2"]);
        assert_eq!(FsdpModule::of(&model)?.own().paths(), ["root"]);
        Ok(())
    })
    .unwrap();
}

/// The root's own unit is not among the blocks.
#[test]
fn own_units_of_a_match_are_those_that_match() {
    launch(Launch::threads(2), |world| {
        let model = sharded(world, &stack(&Device::flex()), ReshardAfterForward::Always)?;
        let units = FsdpModule::of(&model)?;
        let blocks = units.clone().matching(["blocks.*"])?;
        assert_eq!(blocks.own().paths(), [""; 0]);
        let some = units.matching(["root", "blocks.1"])?;
        assert_eq!(some.own().paths(), ["root"]);
        Ok(())
    })
    .unwrap();
}

/// Each rank's whole gradients, summed and divided by `factor`; of one rank and several, with and
/// without replicas.
#[test]
fn gradients_are_divided_by_a_factor() {
    let model = stack(&Device::flex());
    for (ranks, shape) in [
        (1, vec![1]),
        (2, vec![2]),
        (3, vec![3]),
        (4, vec![2, 2]),
        (4, vec![4, 1]),
    ] {
        for factor in [None, Some(1.0), Some(2.0), Some(3.0), Some(8.0)] {
            for force_sum in [false, true] {
                let results = launch(Launch::threads(ranks), |world| {
                    let device = world.device().clone().autodiff();
                    let plain = on_device(&model, &device);
                    let names = ["replicate", "shard"];
                    let mesh = DeviceMesh::new(world, &shape, &names[2 - shape.len()..])?;
                    let sharded = fully_shard(
                        plain.clone(),
                        &mesh,
                        FullyShard::new().with_units(["blocks.*"]),
                    )?;
                    FsdpModule::of(&sharded)?.set_gradient_divide_factor(factor)?;
                    FsdpModule::of(&sharded)?.set_force_sum_reduction(force_sum);
                    let loss = plain
                        .forward(tensor(world.rank() as u64 + 1, [2, WIDTH], &device))
                        .square()
                        .sum();
                    let own = values(
                        &plain,
                        Some(&GradientsParams::from_grads(loss.backward(), &plain)),
                    );
                    Ok((own, step(world, &sharded, || Ok(()))?.0))
                });
                let results = launched::values(results.unwrap());
                let mut expected = mean(results.iter().map(|(own, _)| own));
                let scale = ranks as f64 / factor.unwrap_or(ranks as f64);
                expected
                    .values_mut()
                    .flatten()
                    .for_each(|x| *x = (f64::from(*x) * scale) as f32);
                for (_, grads) in &results {
                    let diff = max_diff(grads, &expected);
                    assert!(
                        diff < 1e-4,
                        "{shape:?}, {factor:?}, force {force_sum}: {diff}"
                    );
                }
            }
        }
    }
}

/// Gradients of mean losses over 0, 1, 2 and 3 rows, weighted by the numbers of rows, and those of
/// the mean over all rows on one device. A rank without a row computes on a row that is not a number.
#[test]
fn weighted_gradients_are_those_of_all_rows() {
    let model = stack(&Device::flex());
    for shape in [vec![2], vec![3], vec![2, 2]] {
        let ranks: usize = shape.iter().product();
        let results = launch(Launch::threads(ranks), |world| {
            let device = world.device().clone().autodiff();
            let plain = on_device(&model, &device);
            let names = ["replicate", "shard"];
            let mesh = DeviceMesh::new(world, &shape, &names[2 - shape.len()..])?;
            let config = FullyShard::new().with_units(["blocks.*"]);
            let sharded = fully_shard(plain.clone(), &mesh, config)?;
            let rows = |rank: usize| tensor::<2>(rank as u64 + 1, [rank, WIDTH], &device);
            let all = Tensor::cat((1..ranks).map(rows).collect(), 0);
            let count = all.dims()[0] as f64;
            let units = FsdpModule::of(&sharded)?;
            units.set_gradient_weight(world.rank() as f64 * ranks as f64 / count)?;
            let own = match world.rank() {
                0 => Tensor::full([1, WIDTH], f32::NAN, &device),
                rank => rows(rank),
            };
            let grads =
                GradientsParams::from_grads(plain.forward(all).square().mean().backward(), &plain);
            let expected = values(&plain, Some(&grads));
            let loss = sharded.forward(own).square().mean();
            let mut grads = GradientsParams::from_grads(loss.backward(), &sharded);
            let full = full_model(&sharded.clone().map(&mut Holder(&mut grads)))?;
            assert!(
                max_diff(&values(&full, None), &expected) < 1e-6,
                "{shape:?}"
            );
            units.set_gradient_weight(1.0)?;
            for weight in [-1.0, f64::NAN, f64::INFINITY] {
                let error = units.set_gradient_weight(weight).unwrap_err();
                assert!(
                    matches!(error, Error::Param(ParamError::GradientWeight { .. })),
                    "{error}"
                );
            }
            Ok(())
        });
        results.unwrap();
    }
}

#[test]
fn backward_gathers_no_unit_that_was_told_not_to() {
    let model = stack(&Device::flex());
    launch(Launch::threads(2), |world| {
        let model = sharded(world, &model, ReshardAfterForward::Always)?;
        let (_, gathers) = step(world, &model, || Ok(()))?;
        assert_eq!(gathers, ALL);
        // Nothing before the first block asks for the gradient of its input, so its weight is not
        // read in backward.
        let device = world.device().clone().autodiff();
        let block = &model.blocks[0];
        FsdpModule::of(block)?.set_unshard_in_backward(false);
        let x = tensor::<2>(1, [2, WIDTH], &device);
        let before = world.ledger().calls(Op::AllGather);
        let grads = unit(block, x, |block, x| block.forward(x)).sum().backward();
        assert_eq!(world.ledger().calls(Op::AllGather) - before, 1, "forward's");
        assert!(block.weight.base().grad(&grads).is_some());
        Ok(())
    })
    .unwrap();
}

/// It is told which unit, and what to do: where an operation reads a weight that it has saved, and
/// where burn's gradient checkpointing asks for it again.
#[test]
fn a_backward_that_reads_what_it_was_told_not_to_gather_fails_with_an_error() {
    let model = stack(&Device::flex());
    for checkpointing in [false, true] {
        let end = launch(Launch::threads(2), |world| {
            let device = world.device().clone().autodiff();
            let device = if checkpointing {
                device.gradient_checkpointing()
            } else {
                device
            };
            let config = FullyShard::new().with_units(["blocks.*"]);
            let mesh = DeviceMesh::new(world, [2], ["shard"])?;
            let model = fully_shard(on_device(&model, &device), &mesh, config)?;
            FsdpModule::of(&model.blocks[1])?.set_unshard_in_backward(false);
            let x = tensor::<2>(1, [2, WIDTH], &device);
            drop(model.forward(x).sum().backward());
            Ok(())
        });
        let error = end.expect_err("the gradient of the block's input needs its weight");
        let Error::Param(ParamError::NotUnsharded { unit }) = &error.cause else {
            panic!("{error}")
        };
        assert_eq!(unit, "blocks.1");
        assert!(
            error.to_string().contains("set_unshard_in_backward(true)"),
            "{error}"
        );
    }
}

/// An evaluation of a model that keeps its parameters gathers once, until the optimizer steps.
#[test]
fn forwards_without_backward_share_what_is_kept() {
    let model = stack(&Device::flex());
    launch(Launch::threads(2), |world| {
        let model = sharded(world, &model, ReshardAfterForward::Never)?;
        let x = || tensor::<2>(1, [2, WIDTH], world.device());
        let valid = model.valid();
        let gathers = |model: &Stack| {
            let before = world.ledger().calls(Op::AllGather);
            let output = model.forward(x());
            (
                world.ledger().calls(Op::AllGather) - before,
                output.into_data(),
            )
        };
        let (first, output) = gathers(&valid);
        assert_eq!(first, ALL);
        assert_eq!(gathers(&valid), (0, output.clone()));
        let stepped = model.map(&mut super::support::Shift).valid();
        let (again, moved) = gathers(&stepped);
        assert_eq!(again, ALL, "new shards");
        assert_ne!(moved, output);
        Ok(())
    })
    .unwrap();
}

/// A panic of the program's in the middle of a step, which it catches: the next step is as if it
/// had never been.
#[test]
fn an_iteration_that_was_given_up_leaves_nothing() {
    let model = stack(&Device::flex());
    for ranks in [1, 2] {
        launch(Launch::threads(ranks), |world| {
            let device = world.device().clone().autodiff();
            let model = sharded(world, &model, ReshardAfterForward::Auto)?;
            let (expected, _) = step(world, &model, || Ok(()))?;
            let x = || tensor::<2>(3, [2, WIDTH], &device);
            FsdpModule::of(&model)?.set_requires_gradient_sync(false);
            drop(model.forward(x()).sum().backward());
            let given_up = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                unit(&model, x(), |model, x| {
                    let x = unit(&model.blocks[0], x, |block, x| block.forward(x));
                    if world.size() > 0 {
                        panic!("the program's own");
                    }
                    x
                })
            }));
            assert!(given_up.is_err());
            FsdpModule::of(&model)?.reset_iter_state();
            FsdpModule::of(&model)?.set_requires_gradient_sync(true);
            assert_eq!(step(world, &model, || Ok(()))?.0, expected, "{ranks} ranks");
            Ok(())
        })
        .unwrap();
    }
}

/// The same in the middle of backward, where reductions are under way whose results nobody takes.
#[test]
fn a_backward_that_was_given_up_leaves_no_gradient_to_the_next() {
    let model = stack(&Device::flex());
    for (ranks, shape) in [(1, vec![1]), (2, vec![2]), (4, vec![2, 2])] {
        launch(Launch::threads(ranks), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, &shape, &["replicate", "shard"][2 - shape.len()..])?;
            let model = fully_shard(
                on_device(&model, &device),
                &mesh,
                FullyShard::new().with_units(["blocks.*"]),
            )?;
            // Outputs in no loss, which keep the passes of their units alive.
            let unused = std::cell::RefCell::new(Vec::new());
            let backward = |seed: u64, panics: bool| {
                let x = tensor::<2>(seed + world.rank() as u64, [2, WIDTH], &device);
                let loss = unit(&model, x, |model, x| {
                    let mut x = model.first.forward(x);
                    for (at, block) in model.blocks.iter().enumerate() {
                        let other;
                        (x, other) = unit(block, x, |block, x| {
                            let x = block.forward(x).tanh();
                            (x.clone(), x * 2.0)
                        });
                        unused.borrow_mut().push(other);
                        if at == 0 {
                            x = in_backward(x, move || assert!(!panics, "the program's own"));
                        }
                    }
                    x
                });
                let grads = GradientsParams::from_grads(loss.square().sum().backward(), &model);
                values(&model, Some(&grads))
            };
            // All from one place, at one depth of the stack: where one backward was, the next one
            // is.
            let mut expected = None;
            for seed in [7, 20, 7, 20, 30, 7] {
                let is_given_up = seed != 7;
                let run = std::panic::AssertUnwindSafe(|| backward(seed, is_given_up));
                let grads = std::panic::catch_unwind(run).ok();
                assert_eq!(grads.is_none(), is_given_up, "{shape:?}, {seed}");
                if let Some(grads) = grads {
                    assert_eq!(
                        &grads,
                        expected.get_or_insert_with(|| grads.clone()),
                        "{shape:?}"
                    );
                }
            }
            Ok(())
        })
        .unwrap();
    }
}
