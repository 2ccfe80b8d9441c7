//! Ranks post the same collectives whatever only one of them has: a graph that burn keeps a little
//! longer, a tensor that it tracks, a model that it exports. Invariant 5 of `param`.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::fsdp::{
    EventKind, FsdpModule, checkpoint_activations, full_model_on, record_events,
};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::{MeshTest, trace_backward};

use super::support::{Shift, max_diff, mean, on_device, tensor, values};
use crate::parallel::support::full_grads;

const RANKS: usize = 2;
const WIDTH: usize = 4;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    block: Linear,
    head: Linear,
}

impl Net {
    fn new() -> Self {
        let device = Device::flex();
        let layer = |seed| {
            let layer = LinearConfig::new(WIDTH, WIDTH)
                .with_bias(false)
                .init(&device);
            Linear {
                weight: burn::module::Param::from_tensor(tensor(seed, [WIDTH, WIDTH], &device)),
                ..layer
            }
        };
        Self {
            first: layer(1),
            block: layer(2),
            head: layer(3),
        }
    }

    /// The loss of a forward, in which the block's weight may be left unused.
    fn loss(&self, x: Tensor<2>, is_used: bool) -> Tensor<1> {
        unit(self, x, |net, x| {
            let x = net.first.forward(x);
            let x = unit(
                &net.block,
                x,
                |block, x| if is_used { block.forward(x) } else { x },
            );
            net.head.forward(x)
        })
        .square()
        .sum()
    }
}

fn batch(rank: usize, device: &Device) -> Tensor<2> {
    tensor(rank as u64 + 5, [2, WIDTH], device)
}

/// Reshards the model by hand, and returns the number of all-gathers that this posts. The ledger
/// counts those that are waited for.
fn resharded<M: Module>(model: &M) -> Result<usize> {
    let units = FsdpModule::of(model)?;
    let ((), events) = record_events(|| units.reshard());
    Ok(events
        .iter()
        .filter(|event| event.kind == EventKind::Reshard)
        .count())
}

/// A forward that nothing differentiates, as evaluations make them.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Alone {
    None,
    Training,
    Valid,
    Both,
}

/// Rank 1 leaves a weight unused in the first backward, so that burn keeps its graph longer than
/// that of rank 0. The gradients of the last backward are those of one device.
fn trains(policy: ReshardAfterForward, stays: bool, alone: [Alone; 3], reshards: bool) {
    let net = Net::new();
    let expected = {
        let device = Device::flex().autodiff();
        let net = on_device(&net, &device);
        let of_rank = |rank| {
            let grads = net.loss(batch(rank, &device), true).backward();
            values(&net, Some(&GradientsParams::from_grads(grads, &net)))
        };
        mean((0..RANKS).map(of_rank).collect::<Vec<_>>().iter())
    };
    let gathered = MeshTest::new([RANKS], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let config = FullyShard::new()
            .with_units(["block"])
            .with_reshard_after_forward(policy);
        let net = fully_shard(on_device(&net, &device), mesh, config)?;
        FsdpModule::of(&net)?.set_reshard_after_backward(!stays);
        mesh.world().ledger().reset();
        let mut grads = None;
        for (step, alone) in alone.into_iter().enumerate() {
            if matches!(alone, Alone::Valid | Alone::Both) {
                net.valid().loss(batch(mesh.rank(), mesh.device()), true);
            }
            if matches!(alone, Alone::Training | Alone::Both) {
                net.loss(batch(mesh.rank(), &device), true);
            }
            let is_used = step > 0 || mesh.rank() == 0;
            let backward = net.loss(batch(mesh.rank(), &device), is_used).backward();
            grads = Some(GradientsParams::from_grads(backward, &net));
            if reshards && step > 0 {
                FsdpModule::of(&net)?.reshard();
            }
        }
        let diff = max_diff(&full_grads(&net, &grads.expect("a step"))?, &expected);
        assert!(diff < 1e-4, "gradients are off by {diff}");
        Ok(mesh.world().ledger().calls(Op::AllGather))
    });
    assert!(
        gathered.iter().all(|calls| *calls == gathered[0]),
        "{policy:?} {alone:?}: {gathered:?}"
    );
}

#[test]
fn a_weight_that_one_rank_leaves_unused_once_moves_no_all_gather() {
    use Alone::{Both, None, Training, Valid};
    for policy in [
        ReshardAfterForward::Auto,
        ReshardAfterForward::Always,
        ReshardAfterForward::Never,
    ] {
        for stays in [false, true] {
            for reshards in [false, true] {
                for alone in [
                    [Training, Training, None],
                    [None, Training, None],
                    [Both; 3],
                    [Valid, None, Training],
                ] {
                    trains(policy, stays, alone, reshards);
                }
            }
        }
    }
}

/// Weights that the program frees by hand are gathered once for all forwards that wait, also for
/// those that burn has dropped on one rank.
#[test]
fn forwards_that_wait_are_resharded_together() {
    MeshTest::new([RANKS], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let config = FullyShard::new()
            .with_units(["block"])
            .with_reshard_after_forward(ReshardAfterForward::Never);
        let net = fully_shard(on_device(&Net::new(), &device), mesh, config)?;
        let loss = || net.loss(batch(mesh.rank(), &device), true);
        let expected = full_grads(&net, &GradientsParams::from_grads(loss().backward(), &net))?;
        // Only rank 0 keeps the first.
        let kept = (mesh.rank() == 0).then(loss);
        if mesh.rank() == 1 {
            drop(loss());
        }
        let [second, third] = [loss(), loss()];
        mesh.world().ledger().reset();
        // Of two units.
        assert_eq!(resharded(&net)?, 2);
        for loss in [third, second] {
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            let diff = max_diff(&full_grads(&net, &grads)?, &expected);
            assert!(diff < 1e-6, "gradients are off by {diff}");
        }
        drop(kept);
        let posted = mesh.world().ledger().calls(Op::AllGather);
        // One for each of two units; then those by which this test reads gradients.
        let read = 2 * 3;
        assert!(posted <= 2 + read, "{posted} all-gathers");
        // Nothing is left to reshard but what rank 0 never differentiated, which all ranks have
        // gathered already.
        assert_eq!(resharded(&net)?, 0);
        Ok(())
    });
}

/// A rank whose forward is gone takes part in what the program gathers for it, and finds what the
/// others find.
#[test]
fn a_forward_that_one_rank_has_dropped_still_counts() {
    for stays in [false, true] {
        let gathered = MeshTest::new([RANKS], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let config = FullyShard::new()
                .with_units(["block"])
                .with_reshard_after_forward(ReshardAfterForward::Never);
            let net = fully_shard(on_device(&Net::new(), &device), mesh, config)?;
            FsdpModule::of(&net)?.set_reshard_after_backward(!stays);
            let loss = |net: &Net| net.loss(batch(mesh.rank(), &device), true);
            let gathers = || mesh.world().ledger().calls(Op::AllGather);
            let other = net.clone().map(&mut Shift);
            mesh.world().ledger().reset();
            // Rank 0 keeps them. On rank 1 they are dropped, and freed when forwards follow.
            let kept: Vec<_> = [loss(&net), loss(&other)]
                .into_iter()
                .filter(|_| mesh.rank() == 0)
                .collect();
            assert_eq!(gathers(), 4, "of two units, over the shards of two clones");
            let [third, fourth] = [loss(&net), loss(&net)];
            drop(loss(&other));
            assert_eq!(
                gathers(),
                if stays { 4 } else { 10 },
                "they are shared, or gathered for each"
            );
            FsdpModule::of(&net)?.reshard();
            for loss in [fourth, third] {
                drop(loss.backward());
            }
            drop(kept);
            let waited = gathers();
            drop(loss(&net).backward());
            Ok((waited, gathers()))
        });
        assert_eq!(gathered[0], gathered[1], "stays {stays}");
    }
}

/// All ranks reshard a forward that only one rank still keeps.
#[test]
fn a_forward_that_only_one_rank_keeps_is_resharded_by_all() {
    MeshTest::new([RANKS], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let config = FullyShard::new()
            .with_units(["block"])
            .with_reshard_after_forward(ReshardAfterForward::Never);
        let net = fully_shard(on_device(&Net::new(), &device), mesh, config)?;
        let loss = |net: &Net| net.loss(batch(mesh.rank(), &device), true);
        let expected = full_grads(
            &net,
            &GradientsParams::from_grads(loss(&net).backward(), &net),
        )?;
        let kept: Vec<_> = [loss(&net)]
            .into_iter()
            .filter(|_| mesh.rank() == 0)
            .collect();
        let other = net.clone().map(&mut Shift);
        // The second sweeps the one before on rank 1.
        drop([loss(&other), loss(&other)]);
        FsdpModule::of(&net)?.reshard();
        drop(kept);
        let grads = GradientsParams::from_grads(loss(&net).backward(), &net);
        let diff = max_diff(&full_grads(&net, &grads)?, &expected);
        assert!(diff < 1e-6, "gradients are off by {diff}");
        Ok(())
    });
}

/// Ranks that gather a model enter its units one inside the other, and the others do not.
#[test]
fn an_export_before_the_first_forward_teaches_no_order() {
    for ranks in [2, 3] {
        MeshTest::new([ranks], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let config = FullyShard::new().with_units(["block"]);
            let net = fully_shard(on_device(&Net::new(), &device), mesh, config)?;
            for root in [0, ranks - 1] {
                drop(full_model_on(&net, root)?);
                drop(net.loss(batch(mesh.rank(), &device), true).backward());
            }
            Ok(())
        });
    }
}

/// The units of a checkpointed block are gathered for backward on all ranks, also on one where
/// nothing in it is tracked.
#[test]
fn a_checkpointed_block_is_gathered_whatever_a_rank_tracks() {
    for unshards in [true, false] {
        for untracked in [None, Some(0), Some(1)] {
            MeshTest::new([RANKS], ["shard"]).run(|mesh| {
                let device = mesh.device().clone().autodiff();
                let net = on_device(&Net::new(), &device);
                let net = Net {
                    block: net.block.no_grad(),
                    ..net
                };
                let config = FullyShard::new()
                    .with_units(["block"])
                    .with_reshard_after_forward(ReshardAfterForward::Always);
                let net = fully_shard(net, mesh, config)?;
                FsdpModule::of(&net.block)?.set_unshard_in_backward(unshards);
                for _ in 0..2 {
                    let y = unit(&net, batch(mesh.rank(), &device), |net, x| {
                        let x = if untracked == Some(mesh.rank()) {
                            x
                        } else {
                            net.first.forward(x)
                        };
                        net.head
                            .forward(checkpoint_activations(&net.block, x, |block, x| {
                                block.forward(x)
                            }))
                    });
                    drop(y.square().sum().backward());
                }
                Ok(())
            });
        }
    }
}

/// A redistribution whose gradient is local draws its index on all ranks: the reductions that
/// follow have the same.
#[test]
fn a_tensor_that_one_rank_detaches_shifts_no_index() {
    for detached in [None, Some(0), Some(1)] {
        MeshTest::new([RANKS], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let config = FullyShard::new().with_units(["block", "head"]);
            let net = fully_shard(on_device(&Net::new(), &device), mesh, config)?;
            for _ in 0..2 {
                let y = unit(&net, batch(mesh.rank(), &device), |net, x| {
                    let features = unit(&net.block, net.first.forward(x), |block, x| {
                        block.forward(x)
                    });
                    let features = if detached == Some(mesh.rank()) {
                        features.detach()
                    } else {
                        features
                    };
                    let all = DTensor::from_local(features, mesh, &[Placement::Shard(0)]);
                    let all = all
                        .and_then(DTensor::full_tensor)
                        .expect("every rank gathers");
                    unit(&net.head, all, |head, x| head.forward(x))
                });
                drop(y.square().sum().backward());
            }
            Ok(())
        });
    }
}

/// A backward inside a unit's own forward leaves nothing to later forwards, nor is it waited for.
#[test]
fn a_backward_inside_a_forward_leaves_nothing_to_the_next() {
    for policy in [
        ReshardAfterForward::Auto,
        ReshardAfterForward::Always,
        ReshardAfterForward::Never,
    ] {
        for stays in [false, true] {
            for steps in [false, true] {
                MeshTest::new([RANKS], ["shard"]).run(|mesh| {
                    let device = mesh.device().clone().autodiff();
                    let config = FullyShard::new().with_reshard_after_forward(policy);
                    let mut layer: Linear =
                        fully_shard(on_device(&Net::new().block, &device), mesh, config)?;
                    FsdpModule::of(&layer)?.set_reshard_after_backward(!stays);
                    let mut posted = Vec::new();
                    for _ in 0..4 {
                        mesh.world().ledger().reset();
                        unit(&layer, batch(mesh.rank(), &device), |layer, x| {
                            let y = layer.forward(x);
                            drop(y.clone().sum().backward());
                            y.detach()
                        });
                        posted.push(mesh.world().ledger().calls(Op::AllGather));
                        if steps {
                            layer = layer.map(&mut Shift);
                        }
                    }
                    assert!(
                        posted[1..].iter().all(|calls| *calls == posted[1]),
                        "{policy:?}, {stays}: {posted:?}"
                    );
                    assert_eq!(resharded(&layer)?, 0, "no forward waits");
                    Ok(())
                });
            }
        }
    }
}

/// Several micro-batches that wait are swept once each, in the order of entries, and as often on
/// every rank.
#[test]
fn microbatches_are_swept_once() {
    let swept = |waiting: usize| {
        let of_ranks = MeshTest::new([RANKS], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let layer = fully_shard(
                on_device(&Net::new().block, &device),
                mesh,
                FullyShard::new(),
            )?;
            let (_, nodes) = trace_backward(|| {
                let forward = |_| {
                    unit(&layer, batch(mesh.rank(), &device), |layer, x| {
                        layer.forward(x)
                    })
                    .sum()
                };
                let losses: Vec<_> = (0..waiting).map(forward).collect();
                losses.into_iter().for_each(|loss| drop(loss.backward()));
            });
            Ok(nodes.iter().filter(|node| node.node == "Sweep").count())
        });
        assert_eq!(of_ranks[0], of_ranks[1]);
        of_ranks[0]
    };
    // The last two have not been waiting for long when the last forward begins.
    assert_eq!([1, 2, 3, 4, 8].map(swept), [0, 0, 1, 2, 6]);
}
