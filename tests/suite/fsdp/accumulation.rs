//! Gradients of several batches: when they are reduced, over which ranks, and what that costs.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, Op, Phase, World, launch};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{
    FsdpModule, FullyShard, NormType, OffloadPolicy, ReshardAfterForward, clip_grad_norm,
    full_model, fully_shard,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::optim::sharded;

use super::collective_counts::{BLOCKS, Stack, WIDTH, stack};
use super::support::{Holder, max_diff, mean, on_device, tensor, values};
use crate::launched;

/// Batches of a step.
const BATCHES: u64 = 3;

/// Which units leave gradients of all batches but the last where they are.
#[derive(Debug, Clone, Copy)]
enum Waits {
    None,
    All,
    Root,
    /// So many blocks.
    Some(usize),
    /// All, over the replicas alone.
    Replicas,
}

impl Waits {
    /// How many units reduce the gradients of each batch.
    fn reducing_each(self) -> u64 {
        let all = BLOCKS as u64 + 1;
        match self {
            Self::None | Self::Replicas => all,
            Self::All => 0,
            Self::Root => all - 1,
            Self::Some(blocks) => all - blocks as u64,
        }
    }

    fn set(self, model: &Stack, is_last: bool) -> Result<()> {
        let all = FsdpModule::of(model)?;
        match self {
            Self::None => {}
            Self::All => all.set_requires_gradient_sync(is_last),
            Self::Root => all.own().set_requires_gradient_sync(is_last),
            Self::Some(blocks) => {
                for block in &model.blocks[..blocks] {
                    FsdpModule::of(block)?.set_requires_gradient_sync(is_last);
                }
            }
            Self::Replicas => all.set_requires_all_reduce(is_last),
        }
        Ok(())
    }
}

/// What is kept from batch to batch.
#[derive(Debug, Clone, Copy)]
enum Keeps {
    Nothing,
    /// From forward to backward, a shard over two ranks.
    HalfShards,
    /// From forward to backward.
    Forward,
    /// All through.
    All,
}

impl Keeps {
    fn reshard(self) -> ReshardAfterForward {
        match self {
            Self::Nothing => ReshardAfterForward::Always,
            Self::HalfShards => ReshardAfterForward::Ranks(2),
            Self::Forward | Self::All => ReshardAfterForward::Never,
        }
    }

    fn gathers(self) -> u64 {
        let units = BLOCKS as u64 + 1;
        match self {
            Self::Nothing | Self::HalfShards => 2 * units * BATCHES,
            Self::Forward => units * BATCHES,
            Self::All => units,
        }
    }
}

fn mesh(world: &World, is_hsdp: bool) -> Result<DeviceMesh> {
    match is_hsdp {
        false => DeviceMesh::new(world, [world.size()], ["shard"]),
        true => DeviceMesh::new(world, [2, world.size() / 2], ["replicate", "shard"]),
    }
}

fn batch(rank: usize, at: u64, device: &Device) -> Tensor<2> {
    tensor(10 * at + rank as u64 + 1, [2, WIDTH], device)
}

/// Gradients of one step, added up over its batches.
fn step(
    model: &Stack,
    rank: usize,
    device: &Device,
    before: impl Fn(bool) -> Result<()>,
) -> Result<GradientsParams> {
    let mut sum = GradientsAccumulator::new();
    for at in 0..BATCHES {
        before(at + 1 == BATCHES)?;
        let loss = model.forward(batch(rank, at, device)).square().sum();
        sum.accumulate(model, GradientsParams::from_grads(loss.backward(), model));
    }
    Ok(sum.grads())
}

/// Whole gradients, by path.
fn gathered(model: &Stack, grads: &mut GradientsParams) -> Result<BTreeMap<String, Vec<f32>>> {
    Ok(values(
        &full_model(&model.clone().map(&mut Holder(grads)))?,
        None,
    ))
}

/// Checks the collectives and the gradients of two steps, whichever units wait.
fn accumulates(ranks: usize, is_hsdp: bool, keeps: Keeps, offload: OffloadPolicy) {
    let model = stack(&Device::flex());
    let expected = {
        let device = Device::flex().autodiff();
        let model = on_device(&model, &device);
        let of_rank = |rank| {
            let grads = step(&model, rank, &device, |_| Ok(())).unwrap();
            values(&model, Some(&grads))
        };
        let of_ranks: Vec<_> = (0..ranks).map(of_rank).collect();
        mean(of_ranks.iter())
    };
    let units = BLOCKS as u64 + 1;
    for waits in [
        Waits::None,
        Waits::All,
        Waits::Root,
        Waits::Some(1),
        Waits::Some(BLOCKS),
        Waits::Replicas,
    ] {
        let cell = format!("{ranks} ranks, replicas {is_hsdp}, {waits:?}, {keeps:?}, {offload:?}");
        let grads = launch(Launch::threads(ranks), |world| {
            let device = world.device().clone().autodiff();
            let config = FullyShard::new()
                .with_units(["blocks.*"])
                .with_reshard_after_forward(keeps.reshard())
                .with_offload(offload);
            let model = fully_shard(on_device(&model, &device), &mesh(world, is_hsdp)?, config)?;
            for _ in 0..2 {
                world.ledger().reset();
                let mut grads = step(&model, world.rank(), &device, |is_last| {
                    if let Keeps::All = keeps {
                        FsdpModule::of(&model)?.set_reshard_after_backward(is_last);
                    }
                    waits.set(&model, is_last)
                })?;
                let calls = |op| world.ledger().calls(op);
                let reduced = units + (BATCHES - 1) * waits.reducing_each();
                assert_eq!(calls(Op::AllGather), keeps.gathers(), "{cell}");
                assert_eq!(calls(Op::ReduceScatter), reduced, "{cell}");
                let over_replicas = match (is_hsdp, waits) {
                    (false, _) => 0,
                    (true, Waits::Replicas) => units,
                    (true, _) => reduced,
                };
                assert_eq!(calls(Op::AllReduce), over_replicas, "{cell}");
                if let Keeps::HalfShards = keeps {
                    let of_two = world.ledger().recent().into_iter();
                    let of_two = of_two.filter(|entry| entry.group_size == 2);
                    let phases: Vec<_> = of_two.map(|entry| (entry.op, entry.phase)).collect();
                    let backward = (Op::AllGather, Phase::Backward);
                    assert_eq!(phases, vec![backward; (units * BATCHES) as usize], "{cell}");
                }
                let is_offloaded = world.ledger().host_copies().len() as u64 == units;
                assert_eq!(is_offloaded, offload == OffloadPolicy::Cpu, "{cell}");
                let diff = max_diff(&gathered(&model, &mut grads)?, &expected);
                assert!(diff < 1e-5, "{cell}: {diff}");
            }
            Ok(())
        });
        grads.unwrap_or_else(|error| panic!("{cell}: {error}"));
    }
}

#[test]
fn accumulation_by_count_and_by_value() {
    for (ranks, is_hsdp) in [(2, false), (3, false), (4, true)] {
        for keeps in [Keeps::Nothing, Keeps::Forward, Keeps::All] {
            accumulates(ranks, is_hsdp, keeps, OffloadPolicy::Never);
        }
    }
}

#[test]
fn accumulation_with_shards_over_fewer_ranks_after_forward() {
    for offload in [OffloadPolicy::Never, OffloadPolicy::Cpu] {
        accumulates(4, false, Keeps::HalfShards, offload);
    }
}

#[test]
fn accumulation_with_shards_in_host_memory() {
    for keeps in [Keeps::Nothing, Keeps::Forward, Keeps::All] {
        accumulates(2, false, keeps, OffloadPolicy::Cpu);
    }
    accumulates(4, true, Keeps::Nothing, OffloadPolicy::Cpu);
}

/// Each rank's sum, and then the average: as data parallelism by hand, to the bit.
#[test]
fn what_waits_is_added_up_before_it_is_averaged() {
    let model = stack(&Device::flex());
    let grads = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let sharded = fully_shard(
            plain.clone(),
            &mesh(world, false)?,
            FullyShard::new().with_units(["blocks.*"]),
        )?;
        let own = values(
            &plain,
            Some(&step(&plain, world.rank(), &device, |_| Ok(()))?),
        );
        let waits = |is_last| {
            FsdpModule::of(&sharded)?.set_requires_gradient_sync(is_last);
            Ok(())
        };
        let mut grads = step(&sharded, world.rank(), &device, waits)?;
        Ok((own, gathered(&sharded, &mut grads)?))
    });
    let grads = launched::values(grads.unwrap());
    let expected = mean(grads.iter().map(|(own, _)| own));
    assert!(grads.iter().all(|(_, averaged)| *averaged == expected));
}

#[test]
fn a_guard_holds_gradients_back_while_it_lives() {
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let model = fully_shard(
            stack(&device),
            &mesh(world, false)?,
            FullyShard::new().with_units(["blocks.*"]),
        )?;
        let reduces = || {
            world.ledger().reset();
            let grads = model.forward(batch(0, 0, &device)).sum().backward();
            (
                world.ledger().calls(Op::ReduceScatter),
                model.first.weight.base().grad(&grads).is_some(),
            )
        };
        let all = BLOCKS as u64 + 1;
        {
            let _held = FsdpModule::of(&model)?.no_sync();
            assert_eq!(reduces(), (0, false));
            let _twice = FsdpModule::of(&model)?.own().no_sync();
        }
        assert_eq!(reduces(), (all, true));
        Ok(())
    })
    .unwrap();
}

/// The usual mistake: the condition for the last batch is never true. Nothing of the step is sent.
#[test]
fn a_step_whose_gradients_wait_is_refused() {
    for (is_hsdp, ranks) in [(false, 2), (true, 4)] {
        let errors = launch(Launch::threads(ranks), |world| {
            let device = world.device().clone().autodiff();
            let config = FullyShard::new()
                .with_units(["blocks.*"])
                .with_ignored(["first.bias"]);
            let model = fully_shard(stack(&device), &mesh(world, is_hsdp)?, config)?;
            let mut optim = sharded(AdamWConfig::new());
            let all = FsdpModule::of(&model)?;
            let wait = |waits: bool| match is_hsdp {
                false => all.set_requires_gradient_sync(!waits),
                true => all.set_requires_all_reduce(!waits),
            };
            let grads = || {
                let loss = model
                    .forward(batch(world.rank(), 0, &device))
                    .square()
                    .sum();
                GradientsParams::from_grads(loss.backward(), &model)
            };
            wait(true);
            let mut waiting = grads();
            // An ignored parameter has a gradient all the same.
            assert_eq!(waiting.len(), 1);
            let before = world.ledger().total(|_| true).calls;
            let clipped = clip_grad_norm(&model, &mut waiting, 1.0, NormType::L2).map(|_| ());
            let stepped = optim.step(0.1, model.clone(), waiting).map(drop);
            assert_eq!(world.ledger().total(|_| true).calls, before);

            // Gradients of one unit are a step: another one may wait for several.
            wait(false);
            FsdpModule::of(&model.blocks[0])?.set_requires_gradient_sync(false);
            let mut some = grads();
            clip_grad_norm(&model, &mut some, 1.0, NormType::L2)?;
            FsdpModule::of(&model.blocks[0])?.set_requires_gradient_sync(true);
            all.reset_iter_state();
            optim.step(0.1, model.clone(), grads())?;
            Ok([clipped, stepped].map(|refused| refused.expect_err("gradients wait")))
        });
        for error in launched::values(errors.unwrap()).into_iter().flatten() {
            assert!(
                matches!(&error, burn_dtensor::Error::Param(ParamError::StepWithoutGradients { unit }) if unit == "root"),
                "{error}"
            );
            assert!(
                error
                    .to_string()
                    .contains("set_requires_gradient_sync(true)"),
                "{error}"
            );
        }
    }
}

#[test]
fn gradients_that_were_never_reduced_are_told() {
    let errors = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let model = fully_shard(
            stack(&device),
            &mesh(world, false)?,
            FullyShard::new().with_units(["blocks.*"]),
        )?;
        let backward = |model: &Stack| drop(model.forward(batch(0, 0, &device)).sum().backward());
        FsdpModule::of(&model)?.set_requires_gradient_sync(false);
        backward(&model);
        let stepped = model.clone().map(&mut super::support::Shift);
        let caught = burn_dtensor::Error::catch(|| {
            backward(&stepped);
            Ok(())
        });
        let error = caught.expect_err("gradients wait");
        FsdpModule::of(&stepped)?.reset_iter_state();
        backward(&stepped);
        Ok(error)
    });
    for error in launched::values(errors.unwrap()) {
        assert!(
            matches!(&error, burn_dtensor::Error::Param(ParamError::PendingGradients { unit }) if unit == "root"),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("set_requires_gradient_sync(true)"),
            "{error}"
        );
    }
}
