//! What units do, in order: the traces of FSDP2 that `golden_events_one_by_one` has not.

use burn::tensor::{Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, World, launch};
use burn_dtensor::fsdp::{
    Event, EventKind, FullyShard, ReshardAfterForward, Units, fully_shard, record_events, unit, units,
};
use burn_dtensor::mesh::DeviceMesh;

use super::collectives::{Stack, WIDTH, stack};
use super::support::{on_device, tensor};

/// `U0` for the first block unsharded, `R` for resharded, `B` for its post-backward, `U` alone for the root's; a unit of
/// several modules has the initials of all.
pub(super) fn trace(events: &[Event]) -> String {
    let letter = |event: &Event| {
        let kind = match event.kind {
            EventKind::Unshard => "U",
            EventKind::Reshard => "R",
            EventKind::PostBackward => "B",
            _ => return None,
        };
        let initial = |module: &str| module.strip_prefix("blocks.").unwrap_or(module).chars().next();
        let unit: String = event.unit.split(", ").filter(|unit| *unit != "root").filter_map(initial).collect();
        Some(format!("{kind}{unit}"))
    };
    events.iter().filter_map(letter).collect::<Vec<_>>().join(" ")
}

/// Those of some kinds.
fn only(trace: &str, kinds: &str) -> String {
    trace.split(' ').filter(|event| kinds.contains(&event[..1])).collect::<Vec<_>>().join(" ")
}

fn sharded(world: &World, reshard: ReshardAfterForward, device: &Device) -> Result<Stack> {
    let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
    let config = FullyShard::new().units(["blocks.*"]).reshard_after_forward(reshard);
    fully_shard(on_device(&stack(&Device::flex()), device), &mesh, config)
}

/// A batch whose gradient is wanted.
fn differentiable(at: u64, device: &Device) -> Tensor<2> {
    tensor::<2>(at, [2, WIDTH], device).require_grad()
}

#[test]
fn one_forward_and_its_backward() {
    for (reshard, prefetch, forward, backward) in [
        (ReshardAfterForward::Always, 0, "U U0 R0 U1 R1 U2 R2 R", "U U2 U1 R2 B2 U0 R1 B1 R0 B0 R B"),
        (ReshardAfterForward::Auto, 0, "U U0 R0 U1 R1 U2 R2", "U2 U1 R2 B2 U0 R1 B1 R0 B0 R B"),
        (ReshardAfterForward::Never, 0, "U U0 U1 U2", "R2 B2 R1 B1 R0 B0 R B"),
        (ReshardAfterForward::Always, 1, "U U0 U1 R0 U2 R1 R2 R", "U U2 U1 R2 B2 U0 R1 B1 R0 B0 R B"),
        (ReshardAfterForward::Always, 2, "U U0 U1 U2 R0 R1 R2 R", "U U2 U1 U0 R2 B2 R1 B1 R0 B0 R B"),
    ] {
        for checkpointing in [false, true] {
            launch(Launch::threads(2), |world| {
                let device = world.device().clone().autodiff();
                let device = if checkpointing { device.gradient_checkpointing() } else { device };
                let model = sharded(world, reshard, &device)?;
                let blocks: Vec<Units> = model.blocks.iter().map(units).collect::<Result<_>>()?;
                for (at, block) in blocks.iter().enumerate().filter(|_| prefetch > 0) {
                    block.set_forward_prefetch(blocks[at + 1..].iter().take(prefetch).cloned());
                    block.set_backward_prefetch(blocks[..at].iter().rev().take(prefetch).cloned());
                }
                for _ in 0..3 {
                    let (loss, events) = record_events(|| model.forward(differentiable(1, &device)).sum());
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

/// How the two interleave in backward is burn's; what each kind does among itself is not.
#[test]
fn two_forwards_before_one_backward() {
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let model = sharded(world, ReshardAfterForward::Always, &device)?;
        let forwards = || [1, 2].map(|at| model.forward(differentiable(at, &device)).sum());
        let ([first, second], events) = record_events(forwards);
        assert_eq!(trace(&events), ["U U0 R0 U1 R1 U2 R2 R"; 2].join(" "));
        let (_, events) = record_events(|| (first + second).backward());
        let trace = trace(&events);
        // The second forward's units, and then the first one's.
        assert_eq!(only(&trace, "B"), ["B2 B1 B0 B"; 2].join(" "), "{trace}");
        let mut gathered: Vec<_> = trace.split(' ').filter(|event| event.starts_with('U')).collect();
        let first_of = |unit: &str| gathered.iter().position(|event| *event == unit);
        assert!(["U", "U2", "U1", "U0"].is_sorted_by_key(|unit| first_of(unit)), "{trace}");
        gathered.sort_unstable();
        assert_eq!(gathered, ["U", "U", "U0", "U0", "U1", "U1", "U2", "U2"], "{trace}");
        Ok(())
    })
    .unwrap();
}

/// Two losses that share no node, each with a backward of its own: what the first gathers of the other's in vain stays
/// and serves the second.
#[test]
fn a_unit_gathered_for_another_backward_is_used_by_it() {
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let model = sharded(world, ReshardAfterForward::Always, &device)?;
        let through = |blocks: &[usize], at| {
            let x = differentiable(at, &device);
            blocks.iter().fold(x, |x, &block| unit(&model.blocks[block], x, |block, x| block.forward(x))).sum()
        };
        let (first, second) = (through(&[0, 1], 1), through(&[2], 2));
        let (_, events) = record_events(|| second.backward());
        assert_eq!(trace(&events), "U2 U1 R2 B2");
        let (_, events) = record_events(|| first.backward());
        assert_eq!(trace(&events), "U0 R1 B1 R0 B0", "U1 was gathered by the other");
        Ok(())
    })
    .unwrap();
}
