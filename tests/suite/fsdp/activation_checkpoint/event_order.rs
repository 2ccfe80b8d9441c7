//! What units do where blocks compute again: what they do without, in the same order.

use burn::tensor::Tensor;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::fsdp::{Event, EventKind, FsdpModule, record_events};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::{BLOCKS, How, KEPT, RECOMPUTED, Tower, WAYS, WIDTH, batch, config};

/// `U1` where block 1 is unsharded, `Uf1` its inner unit; `R` for resharded, `B` for its
/// post-backward; `U` the root's.
fn trace(events: &[Event]) -> String {
    let letter = |event: &Event| {
        let kind = match event.kind {
            EventKind::Unshard => "U",
            EventKind::Reshard => "R",
            EventKind::PostBackward => "B",
            _ => return None,
        };
        let unit = match event.unit.strip_prefix("blocks.") {
            None => String::new(),
            Some(block) => block
                .strip_suffix(".feed")
                .map_or(block.into(), |block| format!("f{block}")),
        };
        Some(format!("{kind}{unit}"))
    };
    events
        .iter()
        .filter_map(letter)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Which units are gathered ahead in backward.
type SetPrefetch = fn(&Tower) -> Result<()>;

fn own(block: &super::Block) -> Result<FsdpModule> {
    Ok(FsdpModule::of(block)?.own())
}

/// With each block its inner unit and the block before; the inner units nothing.
fn both(tower: &Tower) -> Result<()> {
    for (at, block) in tower.blocks.iter().enumerate() {
        let before = tower.blocks[..at].last().map(own).transpose()?;
        own(block)?.set_backward_prefetch([FsdpModule::of(&block.feed)?].into_iter().chain(before));
        FsdpModule::of(&block.feed)?.set_backward_prefetch([]);
    }
    Ok(())
}

/// With each inner unit the block before and its inner unit; the blocks nothing.
fn from_inside(tower: &Tower) -> Result<()> {
    for (at, block) in tower.blocks.iter().enumerate() {
        let before = tower.blocks[..at].last();
        let before = before
            .map(|block| Ok::<_, Error>([own(block)?, FsdpModule::of(&block.feed)?]))
            .transpose()?;
        own(block)?.set_backward_prefetch([]);
        FsdpModule::of(&block.feed)?.set_backward_prefetch(before.into_iter().flatten());
    }
    Ok(())
}

#[test]
fn units_do_what_they_do_without() {
    let forward = "U U0 Uf0 Rf0 R0 U1 Uf1 Rf1 R1 U2 Uf2 Rf2 R2";
    let kept = "Rf2 Bf2 R2 B2 Rf1 Bf1 R1 B1 Rf0 Bf0 R0 B0 R B";
    let automatic = "U2 Uf2 U1 Rf2 Bf2 R2 B2 Uf1 U0 Rf1 Bf1 R1 B1 Uf0 Rf0 Bf0 R0 B0 R B";
    let explicit = "U2 Uf2 U1 Rf2 Bf2 R2 B2 Uf1 U0 Rf1 Bf1 R1 B1 Uf0 Rf0 Bf0 R0 B0 R B";
    let inside = "U2 Uf2 U1 Uf1 Rf2 Bf2 R2 B2 U0 Uf0 Rf1 Bf1 R1 B1 Rf0 Bf0 R0 B0 R B";
    let nothing: SetPrefetch = |_| Ok(());
    let (auto, never) = (ReshardAfterForward::Auto, ReshardAfterForward::Never);
    for (reshard, prefetch, forward, backward) in [
        (auto, nothing, forward, automatic),
        (auto, both, forward, explicit),
        (auto, from_inside, forward, inside),
        (never, nothing, "U U0 Uf0 U1 Uf1 U2 Uf2", kept),
    ] {
        MeshTest::new([2], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = fully_shard(
                Tower::new(&device),
                mesh,
                config().with_reshard_after_forward(reshard),
            )?;
            prefetch(&model)?;
            for how in [KEPT].into_iter().chain(WAYS) {
                let (loss, events) =
                    record_events(|| model.forward(batch(1, &device).require_grad(), how).sum());
                assert_eq!(trace(&events), forward, "{reshard:?}, {how:?}");
                let (_, events) = record_events(|| loss.backward());
                assert_eq!(trace(&events), backward, "{reshard:?}, {how:?}");
            }
            Ok(())
        });
    }
}

/// Of the layers' parameters, in bytes: of the root's two, of each block's, of each inner unit's.
const LAYER: u64 = (WIDTH * WIDTH + WIDTH) as u64 * 4;

#[test]
fn a_unit_is_gathered_once_in_backward_and_reduced_once() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard(Tower::new(&device), mesh, config())?;
        let ledger = mesh.world().ledger();
        let inside = 2 * BLOCKS as u64;
        for how in WAYS {
            ledger.reset();
            model.forward(batch(1, &device), how).sum().backward();
            assert_eq!(
                ledger.calls_in(Op::AllGather, Phase::Forward),
                inside + 1,
                "{how:?}"
            );
            assert_eq!(
                ledger.calls_in(Op::AllGather, Phase::Backward),
                inside,
                "{how:?}: the root stays"
            );
            assert_eq!(ledger.calls(Op::ReduceScatter), inside + 1, "{how:?}");
            // Five rows are six, three a rank: weights are cut by rows, biases too.
            assert!(
                ledger.bytes_in(Op::AllGather, Phase::Backward) >= inside * LAYER,
                "{how:?}"
            );
        }
        Ok(())
    });
}

/// What backward computes again it does not free before its gradients are there.
#[test]
fn a_unit_inside_is_not_freed_between_computing_again_and_its_gradients() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard(Tower::new(&device), mesh, config())?;
        let loss = model
            .forward(batch(1, &device).require_grad(), RECOMPUTED)
            .sum();
        let (_, events) = record_events(|| loss.backward());
        for unit in ["blocks.0", "blocks.0.feed", "blocks.2", "blocks.2.feed"] {
            let of = |kind| {
                events
                    .iter()
                    .filter(|event| *event.unit == *unit && event.kind == kind)
                    .count()
            };
            assert_eq!(
                [
                    EventKind::PreBackward,
                    EventKind::Reshard,
                    EventKind::PostBackward
                ]
                .map(of),
                [1; 3],
                "{unit}"
            );
        }
        Ok(())
    });
}

/// Two towers, of which the one that was entered first comes up first: what it has inside is held,
/// as it is itself.
#[test]
fn units_inside_are_reduced_in_reverse_order_of_entry() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard(Tower::new(&device), mesh, config())?;
        for how in [KEPT].into_iter().chain(WAYS) {
            let x = batch(1, &device).require_grad();
            let (a, b) = (
                model.blocks[0].forward(x.clone().tanh().tanh(), how),
                model.blocks[1].forward(x, how),
            );
            let loss = (a.tanh().tanh().tanh() + b).sum();
            let (_, events) = record_events(|| loss.backward());
            let trace = trace(&events);
            let reduced: Vec<_> = trace
                .split(' ')
                .filter(|event| event.starts_with('B'))
                .collect();
            assert_eq!(reduced, ["Bf1", "B1", "Bf0", "B0"], "{how:?}: {trace}");
        }
        Ok(())
    });
}

/// [`FsdpModule::set_activation_checkpointing`] by patterns.
#[test]
fn patterns_say_which_units_compute_again() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard(Tower::new(&device), mesh, config())?;
        FsdpModule::of(&model)?
            .matching(["blocks.[02]"])?
            .set_activation_checkpointing(false);
        let computed = [(); BLOCKS].map(|()| Arc::new(AtomicUsize::new(0)));
        let through = |x: Tensor<2>| {
            model
                .blocks
                .iter()
                .zip(&computed)
                .fold(x, |x, (block, count)| {
                    let count = count.clone();
                    checkpoint_activations(block, x, move |block, x| {
                        count.fetch_add(1, Relaxed);
                        block.compute(x, How::default())
                    })
                })
        };
        let counts = || {
            computed
                .iter()
                .map(|count| count.load(Relaxed))
                .collect::<Vec<_>>()
        };
        through(batch(1, &device)).sum().backward();
        assert_eq!(counts(), [1, 2, 1]);
        FsdpModule::of(&model)?.set_activation_checkpointing(true);
        through(batch(1, &device)).sum().backward();
        assert_eq!(counts(), [3, 4, 3]);
        Ok(())
    });
}
