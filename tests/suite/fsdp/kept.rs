//! Weights that stay after backward, where ranks differ in what they use: all ranks keep them, or
//! none.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::fsdp::{FsdpModule, ParamInfo, ParamPlacement, checkpoint_activations};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{max_diff, mean, on_device, tensor, values};
use crate::parallel::support::full_grads;

const WIDTH: usize = 4;
const BATCHES: usize = 3;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(second_is_frozen: bool) -> Self {
        let device = Device::flex();
        let layer = |seed| {
            let layer = LinearConfig::new(WIDTH, WIDTH)
                .with_bias(false)
                .init(&device);
            Linear {
                weight: Param::from_tensor(tensor(seed, [WIDTH, WIDTH], &device)),
                ..layer
            }
        };
        let (first, second) = (layer(1), layer(2));
        Self {
            first,
            second: if second_is_frozen {
                second.no_grad()
            } else {
                second
            },
        }
    }
}

fn batch(rank: usize, at: usize, device: &Device) -> Tensor<2> {
    tensor((10 * at + rank + 5) as u64, [2, WIDTH], device)
}

/// Adds up gradients over several backwards that keep what they have gathered, and holds them to
/// those of one device.
fn accumulates(
    net: &Net,
    config: impl Fn() -> FullyShard + Sync,
    all_gathers: u64,
    forward: impl Fn(&Net, Tensor<2>, usize, usize) -> Tensor<2> + Sync,
) {
    const RANKS: usize = 2;
    let expected = {
        let device = Device::flex().autodiff();
        let net = on_device(net, &device);
        let of_rank = |rank| {
            let of_batch = |at| {
                forward(&net, batch(rank, at, &device), rank, at)
                    .square()
                    .sum()
            };
            let loss = (0..BATCHES)
                .map(of_batch)
                .reduce(|a, b| a + b)
                .expect("a batch");
            values(
                &net,
                Some(&GradientsParams::from_grads(loss.backward(), &net)),
            )
        };
        mean((0..RANKS).map(of_rank).collect::<Vec<_>>().iter())
    };
    MeshTest::new([RANKS], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = fully_shard(on_device(net, &device), mesh, config())?;
        FsdpModule::of(&net)?.set_reshard_after_backward(false);
        mesh.world().ledger().reset();
        let mut grads = None;
        for at in 0..BATCHES {
            FsdpModule::of(&net)?.set_requires_gradient_sync(at + 1 == BATCHES);
            let loss = forward(&net, batch(mesh.rank(), at, &device), mesh.rank(), at)
                .square()
                .sum();
            grads = Some(GradientsParams::from_grads(loss.backward(), &net));
        }
        assert_eq!(mesh.world().ledger().calls(Op::AllGather), all_gathers);
        let diff = max_diff(&full_grads(&net, &grads.expect("a batch"))?, &expected);
        assert!(diff < 1e-4, "gradients are off by {diff}");
        Ok(())
    });
}

#[test]
fn a_unit_stays_that_has_a_matrix_on_every_rank_which_one_leaves_unused() {
    let placed = |param: ParamInfo<'_>| {
        (param.path == "second.weight").then(|| ParamPlacement::from(Placement::Replicate))
    };
    for skipped in [None, Some(0), Some(1)] {
        let config = || {
            FullyShard::new()
                .with_reshard_after_forward(ReshardAfterForward::Always)
                .with_shard_placement_fn(placed)
        };
        // Each forward's own for backward, and the first forward's.
        accumulates(
            &Net::new(false),
            config,
            1 + BATCHES as u64,
            |net, x, rank, at| {
                unit(net, x, |net, x| {
                    let x = net.first.forward(x);
                    if rank == 1 && Some(at) == skipped {
                        x
                    } else {
                        net.second.forward(x)
                    }
                })
            },
        );
    }
}

#[test]
fn a_frozen_unit_stays_whose_input_one_rank_does_not_track() {
    use ReshardAfterForward::{Always, Never};
    for (reshard, all_gathers) in [(Always, 2 * (1 + BATCHES as u64)), (Never, 2)] {
        for untracked in [None, Some(0), Some(1), Some(2)] {
            let config = || {
                FullyShard::new()
                    .with_units(["second"])
                    .with_reshard_after_forward(reshard)
            };
            accumulates(&Net::new(true), config, all_gathers, |net, x, rank, at| {
                unit(net, x, |net, x| {
                    let x = if rank == 1 && Some(at) == untracked {
                        x
                    } else {
                        net.first.forward(x)
                    };
                    unit(&net.second, x, |second, x| second.forward(x))
                })
            });
        }
    }
}

/// No output of the unit is in the loss of one rank: its backward gathers nothing by itself.
#[test]
fn a_unit_stays_whose_output_one_rank_does_not_use() {
    for dropped in [None, Some(0), Some(1)] {
        let config = || {
            FullyShard::new()
                .with_units(["second"])
                .with_reshard_after_forward(ReshardAfterForward::Always)
        };
        accumulates(
            &Net::new(false),
            config,
            2 * (1 + BATCHES as u64),
            |net, x, rank, at| {
                unit(net, x, |net, x| {
                    let x = net.first.forward(x);
                    let y = unit(&net.second, x.clone(), |second, x| second.forward(x));
                    if rank == 1 && Some(at) == dropped {
                        x
                    } else {
                        y
                    }
                })
            },
        );
    }
}

/// The block's backward ends without computing again.
#[test]
fn a_unit_stays_of_a_block_that_no_loss_hears_and_one_rank_does_not_use() {
    for unused in [None, Some(0), Some(1)] {
        let config = || {
            FullyShard::new()
                .with_units(["second"])
                .with_reshard_after_forward(ReshardAfterForward::Always)
        };
        accumulates(
            &Net::new(false),
            config,
            2 * (1 + BATCHES as u64),
            |net, x, rank, at| {
                unit(net, x, |net, x| {
                    let x = net.first.forward(x);
                    let is_used = rank == 0 || Some(at) != unused;
                    checkpoint_activations(&net.second, x.clone(), move |second, x| {
                        if is_used { second.forward(x) } else { x }
                    });
                    x
                })
            },
        );
    }
}

#[test]
fn a_unit_stays_that_a_read_opens_whose_input_one_rank_does_not_track() {
    use ReshardAfterForward::{Always, Never};
    for (reshard, all_gathers) in [(Always, 2 * (1 + BATCHES as u64)), (Never, 2)] {
        for untracked in [None, Some(0), Some(1)] {
            let config = || {
                FullyShard::new()
                    .with_units(["second"])
                    .with_reshard_after_forward(reshard)
            };
            accumulates(&Net::new(false), config, all_gathers, |net, x, rank, at| {
                unit(net, x, |net, x| {
                    let x = if rank == 1 && Some(at) == untracked {
                        x
                    } else {
                        net.first.forward(x)
                    };
                    net.second.forward(x)
                })
            });
        }
    }
}

#[derive(Module, Debug)]
struct Outer {
    block: Net,
}

/// On the rank that does not read the first layer, the block's recomputation has no other tracked
/// tensor.
#[test]
fn a_frozen_unit_stays_in_a_recomputed_block_whose_weights_one_rank_does_not_use() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let config = FullyShard::new()
            .with_units(["block", "block.second"])
            .with_reshard_after_forward(ReshardAfterForward::Always);
        let outer = fully_shard(
            on_device(
                &Outer {
                    block: Net::new(true),
                },
                &device,
            ),
            mesh,
            config,
        )?;
        FsdpModule::of(&outer)?.set_reshard_after_backward(false);
        mesh.world().ledger().reset();
        let is_used = mesh.rank() == 1;
        for at in 0..BATCHES {
            let y = unit(&outer, batch(mesh.rank(), at, &device), |outer, x| {
                checkpoint_activations(&outer.block, x, move |block, x| {
                    let x = if is_used { block.first.forward(x) } else { x };
                    unit(&block.second, x, |second, x| second.forward(x))
                })
            });
            drop(y.square().sum().backward());
        }
        // Both units, for the first forward and for each backward.
        assert_eq!(
            mesh.world().ledger().calls(Op::AllGather),
            2 * (1 + BATCHES as u64)
        );
        Ok(())
    });
}
