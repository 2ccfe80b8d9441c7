//! Ranks whose graphs differ: the order of backward's collectives is that of forward.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, full_model, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;

use super::support::{Holder, max_diff, mean, on_device, tensor, values};
use crate::launched;

/// Two towers and a table.
#[derive(Module, Debug)]
struct Net {
    table: Embedding,
    a: Vec<Linear>,
    b: Vec<Linear>,
}

const WIDTH: usize = 8;
const LAYERS: usize = 3;

fn net(device: &Device) -> Net {
    device.seed(5);
    let linears = || {
        (0..LAYERS)
            .map(|_| LinearConfig::new(WIDTH, WIDTH).init(device))
            .collect()
    };
    let net = Net {
        table: EmbeddingConfig::new(6, WIDTH).init(device),
        a: linears(),
        b: linears(),
    };
    let _ = values(&net, None);
    net
}

const UNITS: [&str; 3] = ["a.*", "b.*", "table"];

/// A rank's batch: rank 0 has more rows than the others.
fn batch(rank: usize, device: &Device) -> Tensor<3> {
    tensor(
        rank as u64 + 1,
        [if rank == 0 { 2 } else { 1 }, 2, WIDTH],
        device,
    )
}

/// What a program computes: gradients are those of its losses, one backward after the other.
type Losses = fn(&Net, Tensor<3>, usize) -> Vec<Tensor<1>>;

/// Runs `losses` on every rank, sharded and not, and compares the gradients: averaged over ranks,
/// added up over losses. `reshard` in all modes, with and without gradient checkpointing.
fn compare(ranks: usize, prepare: fn(Net) -> Net, losses: Losses) {
    compare_units(&UNITS, ranks, prepare, losses);
}

fn compare_units(units: &[&str], ranks: usize, prepare: fn(Net) -> Net, losses: Losses) {
    let model = net(&Device::flex());
    for checkpointing in [false, true] {
        for reshard in [
            ReshardAfterForward::Always,
            ReshardAfterForward::Auto,
            ReshardAfterForward::Never,
        ] {
            let results = launch(Launch::threads(ranks), |world| {
                let device = world.device().clone().autodiff();
                let device = if checkpointing {
                    device.gradient_checkpointing()
                } else {
                    device
                };
                let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
                let plain = prepare(on_device(&model, &device));
                let sharded = fully_shard(
                    plain.clone(),
                    &mesh,
                    FullyShard::new()
                        .with_units(units.iter().copied())
                        .with_reshard_after_forward(reshard),
                )?;
                let run = |model: &Net| {
                    let losses = losses(model, batch(world.rank(), &device), world.rank());
                    losses
                        .into_iter()
                        .map(|loss| GradientsParams::from_grads(loss.backward(), model))
                        .collect()
                };
                let plain_grads: Vec<GradientsParams> = run(&plain);
                let grads: Vec<GradientsParams> = run(&sharded);
                let expected = plain_grads
                    .iter()
                    .map(|grads| values(&plain, Some(grads)))
                    .collect::<Vec<_>>();
                let full = |mut grads| {
                    Ok(values(
                        &full_model(&sharded.clone().map(&mut Holder(&mut grads)))?,
                        None,
                    ))
                };
                Ok((
                    grads.into_iter().map(full).collect::<Result<Vec<_>>>()?,
                    expected,
                ))
            });
            let context = format!("{ranks} ranks, {reshard:?}, checkpointing {checkpointing}");
            let results = results
                .map(launched::values)
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            for nth in 0..results[0].0.len() {
                let mean = mean(results.iter().map(|(_, expected)| &expected[nth]));
                for (grads, _) in &results {
                    let diff = max_diff(&grads[nth], &mean);
                    assert!(
                        diff < 1e-5,
                        "{context}: gradients of loss {nth} differ by {diff}"
                    );
                }
            }
        }
    }
}

fn chain(layers: &[Linear], x: Tensor<3>, more: usize) -> Tensor<3> {
    layers.iter().fold(x, |x, layer| {
        (0..more).fold(unit(layer, x, |layer, x| layer.forward(x)), |x, _| x.tanh())
    })
}

#[test]
fn two_towers_with_unequal_batches() {
    compare(
        2,
        |net| net,
        |net, x, _| vec![(chain(&net.a, x.clone(), 0).mean() + chain(&net.b, x, 0).mean())],
    );
    for depth in [1, 2, 4] {
        let losses: Losses = match depth {
            1 => |net, x, _| vec![chain(&net.a, x.clone(), 0).mean() + flat(&net.b, x, 1)],
            2 => |net, x, _| vec![chain(&net.a, x.clone(), 0).mean() + flat(&net.b, x, 2)],
            _ => |net, x, _| vec![chain(&net.a, x.clone(), 0).mean() + flat(&net.b, x, 4)],
        };
        compare(2, |net| net, losses);
    }
}

/// A tower over matrices, for which burn records other nodes than for batches of matrices.
fn flat(layers: &[Linear], x: Tensor<3>, more: usize) -> Tensor<1> {
    let x = x.slice_dim(1, 0..1).squeeze_dim::<2>(1);
    let tower = |x, layer| {
        (0..more).fold(
            unit(layer, x, |layer: &Linear, x| layer.forward(x)),
            |x, _| x.tanh(),
        )
    };
    layers.iter().fold(x, tower).mean()
}

#[test]
fn two_towers_under_a_root_unit_with_unequal_batches() {
    compare(
        3,
        |net| net,
        |net, x, _| {
            let towers =
                |net: &Net, x: Tensor<3>| flat(&net.a, x.clone(), 2) + chain(&net.b, x, 0).mean();
            vec![unit(net, x, towers)]
        },
    );
}

#[test]
fn a_unit_that_a_rank_does_not_use_next_to_another_tower() {
    for more in 0..3 {
        let losses: Losses = match more {
            0 => |net, x, rank| skipping(net, x, rank, 0),
            1 => |net, x, rank| skipping(net, x, rank, 1),
            _ => |net, x, rank| skipping(net, x, rank, 3),
        };
        compare(2, |net| net, losses);
    }
}

/// Rank 1 runs the first unit of tower `a` without its weights.
fn skipping(net: &Net, x: Tensor<3>, rank: usize, more: usize) -> Vec<Tensor<1>> {
    let skips = |at: usize| rank == 1 && at == 0;
    let a = net.a.iter().enumerate().fold(x.clone(), |x, (at, layer)| {
        unit(
            layer,
            x,
            |layer, x| if skips(at) { x } else { layer.forward(x) },
        )
    });
    vec![a.mean() + chain(&net.b, x, more).mean()]
}

/// The root's own weight, which one rank does not use, is what makes the blocks' input tracked.
#[test]
fn blocks_whose_input_one_rank_alone_tracks() {
    let trained: fn(Net) -> Net = |net| net;
    let frozen: fn(Net) -> Net = |net| Net {
        a: net.a.into_iter().map(Linear::no_grad).collect(),
        ..net
    };
    let first: fn(Net) -> Net = |mut net| {
        net.a[0] = net.a[0].clone().no_grad();
        net
    };
    for prepare in [trained, frozen, first] {
        let prompt: Losses = |net, x, rank| {
            vec![unit(net, x, |net, x| {
                let prompt = net.table.weight.val().sum_dim(0).unsqueeze::<3>();
                let x = if rank == 0 { x + prompt.clone() } else { x };
                chain(&net.a, x, 1).mean() + chain(&net.b, prompt, 0).mean()
            })]
        };
        compare_units(&["a.*", "b.*"], 2, prepare, prompt);
        compare_units(&["a.*"], 2, prepare, prompt);
    }
}

/// Around them is a module without parameters of its own; one rank returns what it was given.
#[test]
fn an_enclosing_module_ties_what_it_returns_to_the_units_inside() {
    compare(
        2,
        |net| net,
        |net, x, rank| {
            let y = unit(net, x.clone(), |net, x| {
                let tower = chain(&net.a, x.clone(), 0);
                if rank == 0 { tower } else { x }
            });
            vec![y.mean() + chain(&net.b, x, 0).mean()]
        },
    );
}

#[test]
fn layers_read_outside_their_units_with_unequal_batches() {
    compare(
        2,
        |net| net,
        |net, x, _| {
            vec![
                net.a
                    .iter()
                    .fold(x, |x, layer| layer.forward(x).tanh())
                    .mean(),
            ]
        },
    );
    compare(
        3,
        |net| net,
        |net, x, _| {
            let forward = |net: &Net, x| {
                net.a
                    .iter()
                    .fold(x, |x: Tensor<3>, layer| layer.forward(x).tanh())
                    .mean()
            };
            vec![unit(net, x, forward)]
        },
    );
}

#[test]
fn a_frozen_embedding_and_leaves_unused_on_one_rank() {
    let frozen = |net: Net| Net {
        table: net.table.no_grad(),
        ..net
    };
    compare(2, frozen, |net, x, rank| {
        let rows = x.dims()[0];
        let tokens = Tensor::<2, Int>::zeros([rows, 2], &x.device());
        let x = unit(&net.table, tokens, |table, tokens| table.forward(tokens));
        let x = unit(&net.a[0], x, |layer, x| layer.forward(x).tanh());
        let x = unit(&net.a[1], x, |layer, x| {
            if rank == 1 {
                x
            } else {
                layer.forward(x).tanh()
            }
        });
        vec![chain(&net.b, x, 1).mean()]
    });
}

/// An encoder, and a decoder with an embedding of its own: a unit without a tracked input that is
/// entered in the middle.
#[test]
fn a_decoder_with_an_embedding_unit() {
    compare(
        2,
        |net| net,
        |net, x, _| {
            let rows = x.dims()[0];
            let encoded = chain(&net.a, x, 1);
            let tokens = Tensor::<2, Int>::zeros([rows, 2], &encoded.device());
            let y = unit(&net.table, tokens, |table, tokens| table.forward(tokens));
            let decoded = net.b.iter().fold(y, |y, layer| {
                unit(layer, (y, encoded.clone()), |layer, (y, encoded)| {
                    layer.forward(y + encoded).tanh()
                })
            });
            vec![decoded.mean()]
        },
    );
}

#[test]
fn a_unit_in_no_loss_and_a_forward_never_differentiated_change_nothing() {
    compare(
        2,
        |net| net,
        |net, x, _| {
            let never = chain(&net.a, x.clone(), 1).mean();
            let y = chain(&net.a, x.clone(), 0);
            let unused = unit(&net.b[0], y.clone(), |layer, y| layer.forward(y));
            let loss = chain(&net.b[1..], y, 1).mean();
            let later = chain(&net.a, x, 1);
            drop((never, unused, later));
            vec![loss]
        },
    );
}

#[test]
fn two_losses_apart_and_two_forwards_in_either_order() {
    compare(
        2,
        |net| net,
        |net, x, _| {
            vec![
                chain(&net.a, x.clone(), 1).mean(),
                chain(&net.b, x, 0).mean(),
            ]
        },
    );
    compare(
        2,
        |net| net,
        |net, x, _| {
            vec![
                chain(&net.b, x.clone(), 0).mean(),
                chain(&net.a, x, 1).mean(),
            ]
        },
    );
    compare(
        2,
        |net| net,
        |net, x, _| {
            vec![
                chain(&net.a, x.clone(), 1).mean(),
                chain(&net.a, x, 0).mean() * 3.0,
            ]
        },
    );
    compare(
        2,
        |net| net,
        |net, x, _| {
            let (first, second) = (
                chain(&net.a, x.clone(), 1).mean(),
                chain(&net.a, x, 0).mean() * 3.0,
            );
            vec![second, first]
        },
    );
}

/// A nested unit in some ranks' loss only is right where another encloses it.
#[test]
fn an_enclosed_unit_in_one_ranks_loss() {
    compare(
        2,
        |net| net,
        |net, x, rank| {
            let forward = |net: &Net, x: Tensor<3>| {
                let a = chain(&net.a, x.clone(), 0).mean();
                let b = chain(&net.b, x, 1).mean();
                if rank == 0 { a } else { a + b }
            };
            vec![unit(net, x, forward)]
        },
    );
}

/// Alone it is an error that names the unit.
#[test]
fn a_unit_in_one_ranks_loss_alone_is_named() {
    let model = net(&Device::flex());
    let error = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let net = fully_shard(
            on_device(&model, &device),
            &mesh,
            FullyShard::new().with_units(UNITS),
        )?;
        let x = batch(world.rank(), &device);
        let (a, b) = (
            chain(&net.a, x.clone(), 0).mean(),
            chain(&net.b, x, 0).mean(),
        );
        let _ = if world.rank() == 0 { a } else { a + b }.backward();
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("`b.2`") && error.contains("rank 0") && error.contains("rank 1"),
        "{error}"
    );
}
