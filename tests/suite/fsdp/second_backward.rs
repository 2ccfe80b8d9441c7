//! Losses that are differentiated apart: right where they share no node of the graph, and told
//! where they do.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Gradients, Tensor};
use burn_dtensor::comm::LaunchError;
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{Holder, furthest, on_device, tensor, values};
use crate::own_process::own_process;

const WIDTH: usize = 5;

type Values = BTreeMap<String, Vec<f32>>;

#[derive(Module, Debug)]
struct Net {
    trunk: Linear,
    left: Linear,
    right: Linear,
    /// Of the model itself.
    own: Vec<Linear>,
}

impl Net {
    fn init(device: &Device) -> Self {
        let linear = |seed, width| {
            let layer = LinearConfig::new(WIDTH, width)
                .with_bias(false)
                .init(device);
            Linear {
                weight: layer
                    .weight
                    .map(|_| tensor(seed, [WIDTH, width], device).require_grad()),
                ..layer
            }
        };
        Self {
            trunk: linear(1, WIDTH),
            left: linear(2, 3),
            right: linear(3, 7),
            own: vec![linear(4, 3), linear(5, 2)],
        }
    }
}

fn config() -> FullyShard {
    FullyShard::new()
        .with_units(["trunk", "left", "right"])
        .with_reshard_after_forward(ReshardAfterForward::Always)
}

fn through(layer: &Linear, x: Tensor<2>) -> Tensor<2> {
    layer.forward(x).tanh()
}

fn batch(rank: usize, device: &Device) -> Tensor<2> {
    tensor(10 + rank as u64, [3, WIDTH], device)
}

/// The losses of the two heads on an input that they share.
fn heads(net: &Net, x: &Tensor<2>) -> [Tensor<1>; 2] {
    [&net.left, &net.right].map(|head| unit(head, x.clone(), through).square().sum())
}

/// Ways to train two heads, in which each loss has a backward of its own.
const RIGHT: [fn(&Net, Tensor<2>) -> Vec<Gradients>; 4] = [
    // Over what the trunk has made of the batch, but without it.
    |net, x| {
        let hidden = unit(&net.trunk, x, through).detach();
        heads(net, &hidden).map(|loss| loss.backward()).into()
    },
    // The later one first, and the trunk by the gradients that both have of its output.
    |net, x| {
        let hidden = unit(&net.trunk, x, through);
        let sizes = hidden.clone().detach().require_grad();
        let [left, right] = heads(net, &sizes);
        let mut grads = vec![right.backward(), left.backward()];
        let of_shard = grads
            .iter()
            .map(|grads| sizes.grad(grads).expect("it is in both losses").into_data());
        let of_shard = of_shard
            .map(|grad| Tensor::<2>::from_data(grad, &sizes.device()))
            .reduce(|a, b| a + b)
            .expect("two");
        grads.push((hidden * of_shard).sum().backward());
        grads
    },
    // Each through a trunk of its own: the unit is run twice.
    |net, x| {
        let run = |head: &Linear| {
            unit(head, unit(&net.trunk, x.clone(), through), through)
                .square()
                .sum()
        };
        [&net.left, &net.right]
            .map(|head| run(head).backward())
            .into()
    },
    // The sum.
    |net, x| {
        let [left, right] = heads(net, &unit(&net.trunk, x, through));
        vec![(left + right).backward()]
    },
];

/// All gradients of a way to train, added up; by path.
fn sum(
    net: &Net,
    grads: Vec<Gradients>,
    full: impl Fn(GradientsParams) -> Result<Values>,
) -> Result<Values> {
    let mut sum = Values::new();
    for grads in grads {
        for (path, grad) in full(GradientsParams::from_grads(grads, net))? {
            let sum = sum.entry(path).or_insert_with(|| vec![0.0; grad.len()]);
            sum.iter_mut()
                .zip(grad)
                .for_each(|(sum, grad)| *sum += grad);
        }
    }
    Ok(sum)
}

fn gradients_are_those_of_one_device(mesh: &DeviceMesh, config: &FullyShard) -> Result<()> {
    let device = mesh.device().clone().autodiff();
    let plain = Net::init(&device);
    let sharded = fully_shard(Net::init(&device), mesh, config.clone())?;
    for train in RIGHT {
        let grads = train(&sharded, batch(mesh.rank(), &device));
        let full = |mut grads| {
            Ok(values(
                &full_model(&sharded.clone().map(&mut Holder(&mut grads)))?,
                None,
            ))
        };
        let found = sum(&sharded, grads, full)?;
        let mut expected = Values::new();
        for rank in 0..mesh.size() {
            let of_rank = sum(&plain, train(&plain, batch(rank, &device)), |grads| {
                Ok(values(&plain, Some(&grads)))
            })?;
            for (path, grad) in of_rank {
                let mean = expected
                    .entry(path)
                    .or_insert_with(|| vec![0.0; grad.len()]);
                mean.iter_mut()
                    .zip(grad)
                    .for_each(|(mean, grad)| *mean += grad / mesh.size() as f32);
            }
        }
        for (path, expected) in expected {
            let off = furthest(&found[&path], &expected);
            assert!(off < 1e-5, "`{path}` is off by {off} on {mesh}");
        }
    }
    Ok(())
}

#[test]
fn losses_that_share_no_node_have_backwards_of_their_own() {
    for ranks in [1, 2, 3, 4, 8] {
        MeshTest::new([ranks], ["shard"])
            .run(|mesh| gradients_are_those_of_one_device(mesh, &config()));
    }
    MeshTest::new([2, 2], ["replicate", "shard"])
        .run(|mesh| gradients_are_those_of_one_device(mesh, &config()));
}

#[cfg(feature = "mpi")]
#[test]
fn losses_that_share_no_node_have_backwards_of_their_own_in_processes() {
    let _ = MeshTest::new([3], ["shard"])
        .with_processes(3)
        .run(|mesh| gradients_are_those_of_one_device(mesh, &config()));
}

/// Two losses of a forward that share something, and the unit that a second backward is told to
/// have come to.
type Wrong = (&'static str, fn(&Net, Tensor<2>) -> [Tensor<1>; 2]);

const WRONG: [Wrong; 5] = [
    // Two outputs, of disjoint weights: without sharding they share only the leaf that the batch
    // is.
    ("root", |net, x| {
        let outputs = unit(net, x, |net, x| {
            (net.own[0].forward(x.clone()), net.own[1].forward(x))
        });
        [outputs.0.sum(), outputs.1.sum()]
    }),
    // One output.
    ("trunk", |net, x| {
        let hidden = unit(&net.trunk, x, through);
        [hidden.clone().sum(), hidden.square().sum()]
    }),
    // Heads that are units of their own, over a trunk that both train.
    ("trunk", |net, x| heads(net, &unit(&net.trunk, x, through))),
    // A weight that left its unit.
    ("right", |net, x| {
        let weight = unit(&net.right, x, |right, _| right.weight.val());
        [weight.clone().sum(), weight.square().sum()]
    }),
    // Of a unit inside, through one around it.
    ("root", |net, x| {
        let outputs = unit(net, x, |net, x| {
            let left = unit(&net.left, x.clone(), through);
            (left.clone().sum(), left.square().sum())
        });
        outputs.into()
    }),
];

fn fails(mesh: &DeviceMesh, losses: fn(&Net, Tensor<2>) -> [Tensor<1>; 2]) -> Result<()> {
    let device = mesh.device().clone().autodiff();
    let net = fully_shard(Net::init(&device), mesh, config())?;
    let [first, second] = losses(&net, batch(mesh.rank(), &device));
    drop(first.backward());
    drop(second.backward());
    Ok(())
}

fn named(error: &LaunchError) -> Vec<String> {
    let own = std::iter::once(&error.cause).chain(
        error
            .others
            .iter()
            .filter_map(|report| report.error.as_ref()),
    );
    let unit = |error: &Error| match error {
        Error::Param(ParamError::SecondBackward { unit }) => Some(unit.clone()),
        _ => None,
    };
    own.filter_map(unit).collect()
}

/// On every rank, before any node of the second backward has run. burn keeps the graphs of
/// backwards that unwound.
#[test]
fn a_second_backward_through_a_unit_names_it_on_every_rank() {
    own_process(
        "fsdp::second_backward::a_second_backward_through_a_unit_names_it_on_every_rank",
        || {
            for (unit, losses) in WRONG {
                for ranks in [1, 2, 3] {
                    let error = launch(Launch::threads(ranks), |world| {
                        fails(&DeviceMesh::new(world, [ranks], ["shard"])?, losses)
                    });
                    let error =
                        error.expect_err("the second backward misses what the first has consumed");
                    assert!(!named(&error).is_empty(), "{error}");
                    assert!(
                        named(&error).iter().all(|name| name == unit),
                        "{unit}: {error}"
                    );
                    assert!(
                        error
                            .to_string()
                            .contains("add the losses up and call backward once"),
                        "{error}"
                    );
                }
            }
        },
    );
}

/// The program may catch it and go on: nothing is left of it.
#[test]
fn who_catches_a_second_backward_goes_on() {
    own_process(
        "fsdp::second_backward::who_catches_a_second_backward_goes_on",
        || {
            for (_, losses) in WRONG {
                MeshTest::new([2], ["shard"]).run(|mesh| {
                    let device = mesh.device().clone().autodiff();
                    let net = fully_shard(Net::init(&device), mesh, config())?;
                    let caught = Error::catch(|| {
                        let [first, second] = losses(&net, batch(mesh.rank(), &device));
                        drop(first.backward());
                        drop(second.backward());
                        Ok(())
                    });
                    let caught = caught.expect_err("the first has consumed the graph");
                    assert!(
                        matches!(caught, Error::Param(ParamError::SecondBackward { .. })),
                        "{caught}"
                    );
                    gradients_are_those_of_one_device(mesh, &config())?;
                    let step = |net: &Net| {
                        heads(net, &unit(&net.trunk, batch(0, &device), through)).map(Tensor::sum)
                    };
                    let [left, right] = step(&net);
                    let mut grads = GradientsParams::from_grads((left + right).backward(), &net);
                    let plain = on_device(&Net::init(&device), &device);
                    let [left, right] = step(&plain);
                    let expected = GradientsParams::from_grads((left + right).backward(), &plain);
                    let found = values(&full_model(&net.map(&mut Holder(&mut grads)))?, None);
                    for (path, expected) in values(&plain, Some(&expected)) {
                        assert!(furthest(&found[&path], &expected) < 1e-5, "{path}");
                    }
                    Ok(())
                });
            }
        },
    );
}

#[cfg(feature = "mpi")]
#[test]
fn a_second_backward_through_a_unit_names_it_in_processes() {
    let test = MeshTest::new([2], ["shard"]).with_processes(2);
    let Some(text) = test.run_failing(|mesh| fails(mesh, WRONG[2].1)) else {
        return;
    };
    assert!(
        text.contains("a second backward reached unit `trunk`"),
        "{text}"
    );
}
