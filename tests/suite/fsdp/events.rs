//! What units do, in order: the traces of FSDP2 that `golden_events_one_by_one` has not.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, World, launch};
use burn_dtensor::fsdp::{
    Event, EventKind, FsdpModule, FullyShard, ReshardAfterForward, checkpoint_activations,
    fully_shard, record_events, unit,
};
use burn_dtensor::mesh::DeviceMesh;

use super::collective_counts::{BLOCKS, Stack, WIDTH, stack};
use super::support::{on_device, tensor};

/// `U0` for the first block unsharded, `R` for resharded, `B` for its post-backward, `U` alone for
/// the root's; a unit of several modules has the initials of all.
pub(super) fn trace(events: &[Event]) -> String {
    let letter = |event: &Event| {
        let kind = match event.kind {
            EventKind::Unshard => "U",
            EventKind::Reshard => "R",
            EventKind::PostBackward => "B",
            _ => return None,
        };
        let initial = |module: &str| {
            module
                .strip_prefix("blocks.")
                .unwrap_or(module)
                .chars()
                .next()
        };
        let unit: String = event
            .unit
            .split(", ")
            .filter(|unit| *unit != "root")
            .filter_map(initial)
            .collect();
        Some(format!("{kind}{unit}"))
    };
    events
        .iter()
        .filter_map(letter)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Those of some kinds.
fn only(trace: &str, kinds: &str) -> String {
    trace
        .split(' ')
        .filter(|event| kinds.contains(&event[..1]))
        .collect::<Vec<_>>()
        .join(" ")
}

/// Whether a trace has each of these events twice, and no other; the first ones in this order.
fn is_each_twice(trace: &str, events: &str) -> bool {
    let [trace, events] = [trace, events].map(|text| text.split_whitespace().collect::<Vec<_>>());
    let times = |event: &&str| trace.iter().filter(|other| *other == event).count();
    let first = |event: &&str| trace.iter().position(|other| other == event);
    events.iter().all(|event| times(event) == 2)
        && trace.len() == 2 * events.len()
        && events.is_sorted_by_key(first)
}

fn sharded(world: &World, reshard: ReshardAfterForward, device: &Device) -> Result<Stack> {
    let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
    let config = FullyShard::new()
        .with_units(["blocks.*"])
        .with_reshard_after_forward(reshard);
    fully_shard(on_device(&stack(&Device::flex()), device), &mesh, config)
}

/// A batch whose gradient is wanted.
fn differentiable(at: u64, device: &Device) -> Tensor<2> {
    tensor::<2>(at, [2, WIDTH], device).require_grad()
}

#[test]
fn one_forward_and_its_backward() {
    for (reshard, prefetch, forward, backward) in [
        (
            ReshardAfterForward::Always,
            0,
            "U U0 R0 U1 R1 U2 R2 R",
            "U U2 U1 R2 B2 U0 R1 B1 R0 B0 R B",
        ),
        (
            ReshardAfterForward::Auto,
            0,
            "U U0 R0 U1 R1 U2 R2",
            "U2 U1 R2 B2 U0 R1 B1 R0 B0 R B",
        ),
        (
            ReshardAfterForward::Never,
            0,
            "U U0 U1 U2",
            "R2 B2 R1 B1 R0 B0 R B",
        ),
        (
            ReshardAfterForward::Always,
            1,
            "U U0 U1 R0 U2 R1 R2 R",
            "U U2 U1 R2 B2 U0 R1 B1 R0 B0 R B",
        ),
        (
            ReshardAfterForward::Always,
            2,
            "U U0 U1 U2 R0 R1 R2 R",
            "U U2 U1 U0 R2 B2 R1 B1 R0 B0 R B",
        ),
    ] {
        for checkpointing in [false, true] {
            launch(Launch::threads(2), |world| {
                let device = world.device().clone().autodiff();
                let device = if checkpointing {
                    device.gradient_checkpointing()
                } else {
                    device
                };
                let model = sharded(world, reshard, &device)?;
                let blocks: Vec<FsdpModule> = model
                    .blocks
                    .iter()
                    .map(FsdpModule::of)
                    .collect::<Result<_>>()?;
                for (at, block) in blocks.iter().enumerate().filter(|_| prefetch > 0) {
                    block.set_forward_prefetch(blocks[at + 1..].iter().take(prefetch).cloned());
                    block.set_backward_prefetch(blocks[..at].iter().rev().take(prefetch).cloned());
                }
                for _ in 0..3 {
                    let (loss, events) =
                        record_events(|| model.forward(differentiable(1, &device)).sum());
                    assert_eq!(trace(&events), forward, "{reshard:?}, {prefetch} ahead");
                    let (_, events) = record_events(|| loss.backward());
                    assert_eq!(trace(&events), backward, "{reshard:?}, {prefetch} ahead");
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

/// Where activations are computed again in backward, if anywhere.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Checkpointing {
    None,
    /// By burn, on a device with gradient checkpointing.
    Operations,
    /// By [`checkpoint_activations`], in place of `unit` around each block.
    Blocks,
}

/// A forward of `model` in which blocks are checkpointed as `checkpointing` says.
fn forward(model: &Stack, x: Tensor<2>, checkpointing: Checkpointing) -> Tensor<2> {
    let compute = |block: &Linear, x: Tensor<2>| block.forward(x).tanh();
    unit(model, x, |stack, x| {
        let through = |x: Tensor<2>, block: &Linear| match checkpointing {
            Checkpointing::Blocks => checkpoint_activations(block, x, compute),
            Checkpointing::None | Checkpointing::Operations => unit(block, x, compute),
        };
        stack.blocks.iter().fold(stack.first.forward(x), through)
    })
}

/// How the two interleave in backward is burn's; what each kind does among itself is not.
#[test]
fn two_forwards_before_one_backward() {
    let every = "U U2 U1 U0";
    for (ranks, reshard, each_forward, gathered) in [
        (
            2,
            ReshardAfterForward::Always,
            "U U0 R0 U1 R1 U2 R2 R",
            every,
        ),
        (
            2,
            ReshardAfterForward::Auto,
            "U U0 R0 U1 R1 U2 R2",
            "U2 U1 U0",
        ),
        (2, ReshardAfterForward::Never, "U U0 U1 U2", ""),
        (
            4,
            ReshardAfterForward::Ranks(2),
            "U U0 R0 U1 R1 U2 R2 R",
            every,
        ),
    ] {
        for checkpointing in [
            Checkpointing::None,
            Checkpointing::Operations,
            Checkpointing::Blocks,
        ] {
            launch(Launch::threads(ranks), |world| {
                let device = world.device().clone().autodiff();
                let device = if checkpointing == Checkpointing::Operations {
                    device.gradient_checkpointing()
                } else {
                    device
                };
                let model = sharded(world, reshard, &device)?;
                for iteration in 0..2 {
                    let case = format!("{reshard:?}, {checkpointing:?}, iteration {iteration}");
                    let through =
                        |at| forward(&model, differentiable(at, &device), checkpointing).sum();
                    let ([first, second], events) = record_events(|| [1, 2].map(through));
                    assert_eq!(trace(&events), [each_forward; 2].join(" "), "{case}");
                    let (_, events) = record_events(|| (first + second).backward());
                    let trace = trace(&events);
                    // The second forward's units, and then the first one's.
                    assert_eq!(
                        only(&trace, "B"),
                        ["B2 B1 B0 B"; 2].join(" "),
                        "{case}: {trace}"
                    );
                    // What forward has freed is gathered once for each forward, and freed again.
                    assert!(
                        is_each_twice(&only(&trace, "U"), gathered),
                        "{case}: {trace}"
                    );
                    assert!(
                        is_each_twice(&only(&trace, "R"), "R2 R1 R0 R"),
                        "{case}: {trace}"
                    );
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

/// A unit that trains nothing is freed when backward has passed it, not when backward ends; one
/// that backward need not pass is not gathered again.
#[test]
fn frozen_units_are_freed_as_backward_passes_them() {
    let all = [true; BLOCKS];
    for (frozen, root_is_frozen, is_input_tracked, backward) in [
        (
            [false, true, false],
            false,
            true,
            "U U2 U1 R2 B2 U0 R1 R0 B0 R B",
        ),
        (
            [true, false, false],
            false,
            false,
            "U U2 U1 R2 B2 U0 R1 B1 R0 R B",
        ),
        (all, false, true, "U U2 U1 R2 U0 R1 R0 R B"),
        // Only the input has a gradient.
        (all, true, true, "U U2 U1 R2 U0 R1 R0 R"),
        ([true, true, false], true, false, "U2 R2 B2"),
    ] {
        launch(Launch::threads(2), |world| {
            let device = world.device().clone().autodiff();
            let mut model = on_device(&stack(&Device::flex()), &device);
            if root_is_frozen {
                model.first = model.first.no_grad();
            }
            let freeze =
                |(block, frozen): (Linear, bool)| if frozen { block.no_grad() } else { block };
            model.blocks = model.blocks.into_iter().zip(frozen).map(freeze).collect();
            let config = FullyShard::new()
                .with_units(["blocks.*"])
                .with_reshard_after_forward(ReshardAfterForward::Always);
            let model = fully_shard(model, &DeviceMesh::new(world, [2], ["shard"])?, config)?;
            for _ in 0..2 {
                let x = differentiable(1, &device).set_require_grad(is_input_tracked);
                let (loss, events) = record_events(|| model.forward(x).sum());
                assert_eq!(
                    trace(&events),
                    "U U0 R0 U1 R1 U2 R2 R",
                    "{frozen:?}, root {root_is_frozen}"
                );
                let (_, events) = record_events(|| loss.backward());
                assert_eq!(
                    trace(&events),
                    backward,
                    "{frozen:?}, root {root_is_frozen}"
                );
            }
            Ok(())
        })
        .unwrap();
    }
}

/// Two losses that share no node, each with a backward of its own: what the first gathers of the
/// other's in vain stays and serves the second.
#[test]
fn a_unit_gathered_for_another_backward_is_used_by_it() {
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let model = sharded(world, ReshardAfterForward::Always, &device)?;
        let through = |blocks: &[usize], at| {
            let x = differentiable(at, &device);
            blocks
                .iter()
                .fold(x, |x, &block| {
                    unit(&model.blocks[block], x, |block, x| block.forward(x))
                })
                .sum()
        };
        let (first, second) = (through(&[0, 1], 1), through(&[2], 2));
        let (_, events) = record_events(|| second.backward());
        assert_eq!(trace(&events), "U2 U1 R2 B2");
        let (_, events) = record_events(|| first.backward());
        assert_eq!(
            trace(&events),
            "U0 R1 B1 R0 B0",
            "U1 was gathered by the other"
        );
        Ok(())
    })
    .unwrap();
}
