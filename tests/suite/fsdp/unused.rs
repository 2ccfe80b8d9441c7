//! Parameters that some ranks, or all, leave unused.

use std::ops::Range;

use burn::nn::Linear;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{
    FsdpModule, FullyShard, checkpoint_activations, full_model, fully_shard, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use itertools::Itertools;

use super::net::{Net, WIDTH, compare, config, net};
use super::params_outside_unit;
use super::support::{furthest, on_device, tensor, values};
use crate::launched;

#[test]
fn parameters_unused_on_some_ranks_get_zeros() {
    compare(
        3,
        |net| net,
        config(),
        |net, x, rank| {
            unit(net, x, |net, x| {
                let x = net.first.forward(x);
                let x = unit(&net.blocks[0], x, |block, x| match rank {
                    0 => x,
                    _ => block.forward(x).tanh(),
                });
                match rank {
                    1 => x,
                    _ => x * net.scale.val().unsqueeze(),
                }
            })
        },
    );
}

#[test]
fn an_input_the_unit_does_not_use_gets_zeros() {
    compare(
        2,
        |net| net,
        config(),
        |net, x, _| {
            unit(net, x, |net, x| {
                let x = net.first.forward(x);
                let (kept, dropped) = (x.clone(), x * 3.0);
                unit(&net.blocks[0], (kept, dropped), |block, (kept, _)| {
                    block.forward(kept)
                })
            })
        },
    );
}

/// As without sharding, and as in PyTorch.
#[test]
fn a_parameter_that_no_rank_uses_stays_where_it_is() {
    let model = params_outside_unit::net(&Device::flex());
    for size in [[1, 2], [2, 1], [2, 2]] {
        launch(Launch::threads(size[0] * size[1]), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, size, ["replicate", "shard"])?;
            // Steps alternate between two layers; the third is never used, but by the second rank
            // at last.
            let train = |mut model: params_outside_unit::Net, one: bool| {
                let mut optim = AdamWConfig::new().with_weight_decay(0.1).init();
                for step in 0..6 {
                    let loss = unit(
                        &model,
                        tensor(step, [3, params_outside_unit::WIDTH], &device),
                        |net, x| {
                            let x = if step % 2 == 0 {
                                net.first.forward(x)
                            } else {
                                net.blocks[0].forward(x)
                            };
                            if one && step == 5 && world.rank() > 0 {
                                net.blocks[1].forward(x)
                            } else {
                                x
                            }
                        },
                    );
                    let grads =
                        GradientsParams::from_grads(loss.square().mean().backward(), &model);
                    model = optim.step(1e-2, model, grads);
                }
                model
            };
            let plain = on_device(&model, &device);
            let start = values(&plain, None);
            let sharded = fully_shard(plain.clone(), &mesh, FullyShard::new())?;
            let trained = values(&full_model(&train(sharded.clone(), false))?, None);
            let expected = values(&train(plain, false), None);
            for (path, values) in &trained {
                let close = values
                    .iter()
                    .zip(&expected[path])
                    .all(|(a, b)| (a - b).abs() < 1e-5);
                assert!(
                    close,
                    "{size:?} {path}: {values:?} for {:?}",
                    expected[path]
                );
            }
            assert_eq!(trained["blocks.1.weight"], start["blocks.1.weight"]);
            let trained = values(&full_model(&train(sharded, true))?, None);
            assert_ne!(
                trained["blocks.1.weight"], start["blocks.1.weight"],
                "one rank has used it"
            );
            Ok(())
        })
        .unwrap();
    }
}

/// Forward of [`Net`] on the rank of this number. The unsharded model computes the same for all
/// ranks.
type RankForward = fn(&Net, Tensor<2>, usize) -> Tensor<2>;

/// A layer whose output is never above zero after `relu`: the loss depends on its weight, with a
/// gradient of zero.
fn saturated(layer: &Linear, x: Tensor<2>) -> Tensor<2> {
    relu(layer.forward(x) - 1e6)
}

/// Trains [`Net`] with these units, where a step averages `batches` micro-batches whose gradients
/// are reduced with the last, and compares all parameters with those of an unsharded model, to
/// which the losses of all ranks are given. Returns how each parameter has changed: the largest
/// absolute difference.
fn steps(config: &FullyShard, batches: u64, forward: RankForward) -> Vec<(String, f32)> {
    const RANKS: usize = 2;
    let model = net(&Device::flex());
    let changes = launch(Launch::threads(RANKS), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let train = |mut model: Net, ranks: Range<usize>| {
            let mut optim = AdamWConfig::new().with_weight_decay(0.1).init();
            let share = 1.0 / (batches * ranks.len() as u64) as f64;
            for step in 0..3 {
                let mut grads = GradientsAccumulator::new();
                for batch in 0..batches {
                    let loss = |rank: usize| {
                        let x = tensor(step * 100 + batch * 10 + rank as u64, [4, WIDTH], &device);
                        forward(&model, x, rank).square().mean() * share
                    };
                    if let Ok(model) = FsdpModule::of(&model) {
                        model.set_requires_gradient_sync(batch + 1 == batches);
                    }
                    let loss = ranks
                        .clone()
                        .map(loss)
                        .reduce(|sum, loss| sum + loss)
                        .expect("a rank");
                    grads.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
                }
                model = optim.step(1e-2, model, grads.grads());
            }
            model
        };
        let plain = on_device(&model, &device);
        let start = values(&plain, None);
        let sharded = fully_shard(plain.clone(), &mesh, config.clone())?;
        let trained = values(
            &full_model(&train(sharded, world.rank()..world.rank() + 1))?,
            None,
        );
        let expected = values(&train(plain, 0..RANKS), None);
        for (path, values) in &trained {
            let apart = furthest(values, &expected[path]);
            assert!(
                apart < 1e-5,
                "{path}: {values:?} for {:?}, from {:?}",
                expected[path],
                start[path]
            );
        }
        Ok(expected
            .into_iter()
            .map(|(path, values)| (furthest(&values, &start[&path]) as f32, path))
            .collect_vec())
    })
    .map(launched::values)
    .unwrap_or_else(|error| panic!("{error}"));
    changes
        .into_iter()
        .next()
        .expect("a rank")
        .into_iter()
        .map(|(change, path)| (path, change))
        .collect()
}

/// In each case a unit leaves an input unused, and is given zeros for it. A parameter elsewhere
/// whose gradient is zero is stepped all the same: its value and its moments decay. One that
/// reaches only the unused input is not. The first list names the layers that the unsharded model
/// steps, the second those that it leaves as they are.
#[test]
fn a_used_parameter_whose_gradient_is_zero_is_stepped() {
    let cases: [(&str, RankForward, &[&str], &[&str]); 6] = [
        (
            "next to the unit that makes the unused input",
            |net, x, _| {
                unit(net, x, |net, x| {
                    let x = net.first.forward(x);
                    let x = unit(&net.blocks[1], x, |block, x| {
                        saturated(block, x.clone()) + x
                    });
                    let unused = unit(&net.blocks[2], x.clone(), |block, x| block.forward(x));
                    unit(&net.blocks[0], (x, unused), |block, (x, _)| {
                        block.forward(x)
                    })
                })
            },
            &["first", "blocks.0", "blocks.1"],
            &["blocks.2", "spare"],
        ),
        (
            "in the unit that makes the unused input, as another output",
            |net, x, _| {
                unit(net, x, |net, x| {
                    let x = net.first.forward(x);
                    let two = |block: &Linear, x: Tensor<2>| {
                        (saturated(block, x.clone()) + x.clone(), x * 2.0)
                    };
                    let (x, unused) = unit(&net.blocks[1], x, two);
                    unit(&net.blocks[0], (x, unused), |block, (x, _)| {
                        block.forward(x)
                    })
                })
            },
            &["first", "blocks.0", "blocks.1"],
            &["blocks.2", "spare"],
        ),
        (
            "in a unit whose output has a gradient of zero",
            |net, x, _| {
                unit(net, x, |net, x| {
                    let x = net.first.forward(x);
                    let y = unit(&net.blocks[1], x.clone(), |block, x| block.forward(x));
                    let unused = unit(&net.blocks[2], x.clone(), |block, x| block.forward(x));
                    let x = unit(&net.blocks[0], (x, unused), |block, (x, _)| {
                        block.forward(x)
                    });
                    x + relu(y - 1e6)
                })
            },
            &["first", "blocks.0", "blocks.1"],
            &["blocks.2", "spare"],
        ),
        (
            "in the enclosing unit, which makes the unused input",
            |net, x, _| {
                unit(net, x, |net, x| {
                    let unused = net.first.forward(x.clone());
                    let scale = net.scale.val().unsqueeze();
                    let x = x.clone() + relu(x * scale - 1e6);
                    unit(&net.blocks[0], (x, unused), |block, (x, _)| {
                        block.forward(x)
                    })
                })
            },
            &["blocks.0", "scale"],
            &["first", "blocks.1", "blocks.2", "spare"],
        ),
        (
            "in a unit that one rank uses",
            |net, x, rank| {
                unit(net, x, |net, x| {
                    let x = net.first.forward(x);
                    let y = unit(&net.blocks[1], x.clone(), |block, x| block.forward(x));
                    let z = unit(&net.blocks[2], x.clone(), |block, x| block.forward(x));
                    let x = unit(&net.blocks[0], (x, y.clone(), z), |block, (x, ..)| {
                        block.forward(x)
                    });
                    if rank == 1 { x + relu(y - 1e6) } else { x }
                })
            },
            &["first", "blocks.0", "blocks.1"],
            &["blocks.2", "spare"],
        ),
        (
            "in checkpointed blocks",
            |net, x, _| {
                unit(net, x, |net, x| {
                    let x = net.first.forward(x);
                    let run = |layer: &Linear, x: Tensor<2>| {
                        checkpoint_activations(layer, x, |layer, x| layer.forward(x))
                    };
                    let (y, unused) = (
                        run(&net.blocks[1], x.clone()),
                        run(&net.blocks[2], x.clone()),
                    );
                    let left = |block: &Linear, (x, _): (Tensor<2>, Tensor<2>)| block.forward(x);
                    let x = checkpoint_activations(&net.blocks[0], (x, unused), left);
                    x + relu(y - 1e6)
                })
            },
            &["first", "blocks.0", "blocks.1"],
            &["blocks.2", "spare"],
        ),
    ];
    for (case, forward, stepped, left) in cases {
        let all_in_root = FullyShard::new();
        for (config, batches) in [(config(), 1), (config(), 2), (all_in_root, 1)] {
            let changes = steps(&config, batches, forward);
            for (names, is_stepped) in [(stepped, true), (left, false)] {
                for name in names {
                    let mut of_layer = changes.iter().filter(|(path, _)| path.starts_with(name));
                    assert!(
                        of_layer.all(|(_, change)| (*change > 1e-4) == is_stepped),
                        "{case}: {name}: {changes:?}"
                    );
                }
            }
        }
    }
}

/// The output that is left out keeps the block, and a unit before it leaves an input unused.
#[test]
fn a_checkpointed_block_of_which_the_loss_leaves_an_output_passes_gradients_on() {
    let forward: RankForward = |net, x, _| {
        unit(net, x, |net, x| {
            let x = unit(&net.blocks[1], net.first.forward(x), |block, x| {
                block.forward(x)
            });
            let x = unit(&net.blocks[2], (x.clone(), x * 2.0), |block, (x, _)| {
                block.forward(x)
            });
            let two = |block: &Linear, x: Tensor<2>| (block.forward(x.clone()), x * 2.0);
            checkpoint_activations(&net.blocks[0], x, two).0
        })
    };
    for (config, batches) in [(config(), 1), (config(), 2), (FullyShard::new(), 1)] {
        let changes = steps(&config, batches, forward);
        let mut trained = changes
            .iter()
            .filter(|(path, _)| path.starts_with("first") || path.starts_with("blocks"));
        assert!(trained.all(|(_, change)| *change > 1e-4), "{changes:?}");
    }
}
