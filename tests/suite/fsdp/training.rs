//! Ten steps of a sharded model, beside one device that sees the batches of all ranks.

use std::collections::BTreeMap;

use burn::backend::Flex;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{DType, Device, Element, Tensor};
use burn_dtensor::comm::{Launch, Op, launch};
use burn_dtensor::fsdp::{ParamInfo, unshard};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{Cast, elements, furthest, on_device, tensor, values};

const STEPS: u64 = 10;
/// Lengths of features that ranks cannot share evenly; of three rows the last of four ranks has
/// none.
const WIDTHS: [usize; 5] = [5, 17, 3, 8, 1];

#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    fn new() -> Self {
        let device = Device::flex();
        device.seed(5);
        let layer = |widths: &[usize]| LinearConfig::new(widths[0], widths[1]).init(&device);
        let mlp = Self {
            layers: WIDTHS.windows(2).map(layer).collect(),
        };
        // Drawn here, on one thread.
        let _ = values(&mlp, None);
        mlp
    }

    /// Each layer is a unit, if it was made one.
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, |mlp, x| {
            mlp.layers.iter().fold(x, |x, layer| {
                unit(layer, x, |layer, x| layer.forward(x).tanh())
            })
        })
    }
}

fn batch(step: u64, rank: usize, device: &Device) -> Tensor<2> {
    tensor(100 * (step + 1) + rank as u64, [4, WIDTHS[0]], device)
}

fn loss(y: Tensor<2>) -> Tensor<1> {
    (y - 0.3).square().mean()
}

/// Trains `model` by the loss of each step; returns it and the losses.
fn train<M: Module>(
    mut model: M,
    loss: impl Fn(&M, u64) -> Result<Tensor<1>>,
) -> Result<(M, Vec<f64>)> {
    let mut optim = AdamConfig::new().with_epsilon(1e-5).init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = loss(&model, step)?;
        losses.push(loss.clone().into_scalar::<f64>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    Ok((model, losses))
}

/// One device, by the mean of the losses of the batches of all ranks.
fn alone(model: &Mlp, ranks: usize, device: &Device) -> (Mlp, Vec<f64>) {
    let mean = |model: &Mlp, step| {
        let losses = (0..ranks).map(|rank| loss(model.forward(batch(step, rank, device))));
        Ok(losses.reduce(|a, b| a + b).expect("a rank") / ranks as f64)
    };
    train(on_device(model, device), mean).unwrap_or_else(|error| panic!("{error}"))
}

/// How far apart the parameters are, over all of them.
fn apart<E: Element + Into<f64>>(
    a: &BTreeMap<String, Vec<E>>,
    b: &BTreeMap<String, Vec<E>>,
) -> f64 {
    assert!(a.keys().eq(b.keys()));
    a.iter()
        .map(|(path, values)| furthest(values, &b[path]))
        .fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a })
}

fn largest(param: ParamInfo) -> Option<Placement> {
    let largest = (0..param.shape.len()).max_by_key(|&dim| param.shape[dim])?;
    Some(Placement::Shard(largest))
}

#[test]
fn one_unit_trains_as_one_device_whichever_dimension_is_sharded() {
    let model = Mlp::new();
    for ranks in [2, 3, 4] {
        let (expected, losses) = alone(&model, ranks, &Device::flex().autodiff());
        let expected = values(&expected, None);
        assert!(
            apart(&expected, &values(&model, None)) > 1e-2,
            "it has learned"
        );
        // A weight is of the features that it takes by those that it makes.
        let (rows, columns) = ([Placement::Shard(0)], [Placement::Shard(1)]);
        for (config, shardings) in [
            (FullyShard::new(), [rows, rows]),
            (
                FullyShard::new().with_shard_placement_fn(largest),
                [columns, rows],
            ),
        ] {
            MeshTest::new([ranks], ["shard"]).run(|mesh| {
                let device = mesh.device().clone().autodiff();
                let sharded = fully_shard(on_device(&model, &device), mesh, config.clone())?;
                for (layer, sizes) in sharded.layers.iter().zip(shardings) {
                    assert_eq!(
                        layer.weight.shard().expect("it is sharded").placements(),
                        sizes
                    );
                }
                let own =
                    |model: &Mlp, step| Ok(loss(model.forward(batch(step, mesh.rank(), &device))));
                let (trained, own) = train(sharded, own)?;
                let diff = apart(&values(&full_model(&trained)?, None), &expected);
                assert!(diff < 1e-5, "weights part by {diff} on {ranks} ranks");
                for (own, expected) in own.into_iter().zip(&losses) {
                    let mean = mesh.all_reduce(own, ReduceOp::Avg)?;
                    assert!(
                        (mean - expected).abs() < 1e-6,
                        "a loss is {mean}, of one device {expected}"
                    );
                }
                Ok(())
            });
        }
    }
}

/// To the bit: nothing is added up.
#[test]
fn one_rank_trains_without_a_collective() {
    let model = Mlp::new();
    let (expected, losses) = alone(&model, 1, &Device::flex().autodiff());
    for units in [vec![], vec!["layers.*"]] {
        launch(Launch::threads(1), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, [1], ["shard"])?;
            let sharded = fully_shard(
                on_device(&model, &device),
                &mesh,
                FullyShard::new().with_units(units.clone()),
            )?;
            let own = |model: &Mlp, step| Ok(loss(model.forward(batch(step, 0, &device))));
            let (trained, own) = train(sharded, own)?;
            assert_eq!(
                values(&full_model(&trained)?, None),
                values(&expected, None)
            );
            assert_eq!(own, losses);
            assert_eq!(world.ledger().total(|_| true).calls, 0);
            Ok(())
        })
        .unwrap();
    }
}

/// In the middle of forward all ranks agree on a scale; what comes after it is gathered meanwhile.
#[test]
fn units_prefetched_around_a_collective_of_the_program() {
    let model = Mlp::new();
    let front = |model: &Mlp, x| unit(&model.layers[0], x, |layer, x| layer.forward(x).tanh());
    let back = |model: &Mlp, x: Tensor<2>, scale: f64| {
        model.layers[1..].iter().fold(x / scale, |x, layer| {
            unit(layer, x, |layer, x| layer.forward(x).tanh())
        })
    };
    let size = |x: &Tensor<2>| x.clone().abs().mean().into_scalar::<f64>();
    let device = Device::flex().autodiff();
    let full = |model: &Mlp, step| {
        let fronts = [0, 1, 2].map(|rank| front(model, batch(step, rank, &device)));
        let scale = fronts.iter().map(size).sum::<f64>() / 3.0;
        Ok(fronts
            .map(|x| loss(back(model, x, scale)))
            .into_iter()
            .reduce(|a, b| a + b)
            .expect("three")
            / 3.0)
    };
    let (expected, _) =
        train(on_device(&model, &device), full).unwrap_or_else(|error| panic!("{error}"));
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let sharded = fully_shard(
            on_device(&model, &device),
            mesh,
            FullyShard::new().with_units(["layers.*"]),
        )?;
        let gathers = || mesh.world().ledger().calls(Op::AllGather);
        let own = |model: &Mlp, step| {
            let before = gathers();
            let first = unshard(&model.layers[0])?;
            let prefetch = model.layers[1..]
                .iter()
                .map(unshard)
                .collect::<Result<Vec<_>>>()?;
            first.wait()?;
            let x = front(model, batch(step, mesh.rank(), &device));
            let scale = mesh.all_reduce(size(&x), ReduceOp::Avg)?;
            for handle in prefetch.into_iter().rev() {
                handle.wait()?;
            }
            let loss = loss(back(model, x, scale));
            assert_eq!(
                gathers() - before,
                4,
                "each unit is gathered once in forward"
            );
            Ok(loss)
        };
        let (trained, _) = train(sharded, own)?;
        let diff = apart(
            &values(&full_model(&trained)?, None),
            &values(&expected, None),
        );
        assert!(diff < 1e-5, "weights part by {diff}");
        Ok(())
    });
}

#[test]
fn a_sharded_model_may_be_cast() {
    let model = Mlp::new();
    let double = |step, rank, device: &Device| batch(step, rank, device).cast(DType::F64);
    let device = Device::flex().autodiff();
    let full = |model: &Mlp, step| {
        Ok((loss(model.forward(double(step, 0, &device)))
            + loss(model.forward(double(step, 1, &device))))
            / 2.0)
    };
    let (expected, _) = train(on_device(&model, &device).map(&mut Cast(DType::F64)), full).unwrap();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let config = FullyShard::new()
            .with_units(["layers.*"])
            .with_reshard_after_forward(ReshardAfterForward::Always);
        let sharded =
            fully_shard(on_device(&model, &device), mesh, config)?.map(&mut Cast(DType::F64));
        let is_double = |model: &Mlp| {
            Ok::<_, Error>(
                named_parameters(model)?
                    .iter()
                    .all(|p| p.spec.dtype() == DType::F64),
            )
        };
        assert!(is_double(&sharded)?);
        let weight = &sharded.layers[0].weight;
        let grads = loss(sharded.forward(double(0, mesh.rank(), &device))).backward();
        let grad = weight.shard_grad(&grads).expect("it is trained");
        assert_eq!(
            (grad.dtype(), grad.local().dtype()),
            (DType::F64, DType::F64)
        );
        let own = |model: &Mlp, step| Ok(loss(model.forward(double(step, mesh.rank(), &device))));
        let (trained, _) = train(sharded, own)?;
        assert!(is_double(&trained)?);
        let (found, expected) = (
            elements::<f64>(&full_model(&trained)?, None),
            elements::<f64>(&expected, None),
        );
        let diff = apart(&found, &expected);
        assert!(diff < 1e-12, "weights part by {diff}");
        Ok(())
    });
}

/// Whatever was gathered meanwhile.
#[test]
fn a_parameter_stores_its_shard_before_and_after_every_pass() {
    let model = Mlp::new();
    for reshard in [
        ReshardAfterForward::Always,
        ReshardAfterForward::Never,
        ReshardAfterForward::Auto,
        ReshardAfterForward::Ranks(2),
    ] {
        MeshTest::new([4], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let plain = on_device(&model, &device);
            let config = FullyShard::new()
                .with_units(["layers.*"])
                .with_reshard_after_forward(reshard);
            let sharded = fully_shard(plain.clone(), mesh, config)?;
            let stored = || -> Result<()> {
                for (layer, plain) in sharded.layers.iter().zip(&plain.layers) {
                    let (full, base) = (plain.weight.val(), layer.weight.base());
                    let shard = layer.weight.shard().expect("it is sharded");
                    assert_eq!(shard.placements(), [Placement::Shard(0)]);
                    assert_eq!(shard.dims(), full.dims());
                    let expected =
                        DTensor::distribute_replicated(full.clone(), mesh, &[Placement::Shard(0)])?;
                    assert_eq!(
                        shard.local().clone().into_data(),
                        expected.to_local().into_data()
                    );
                    assert_eq!(base.into_data(), shard.to_local().into_data());
                    assert_eq!(layer.weight.val().into_data(), full.into_data());
                }
                Ok(())
            };
            stored()?;
            let loss = loss(sharded.forward(batch(0, mesh.rank(), &device)));
            stored()?;
            let grads = loss.backward();
            stored()?;
            let weight = &sharded.layers[1].weight;
            let grad = weight.shard_grad(&grads).expect("it is trained");
            assert_eq!(grad.spec(), weight.shard().expect("it is sharded").spec());
            Ok(())
        });
    }
}

#[test]
fn shards_parameters_and_gradients_of_any_sharding_are_contiguous() {
    fn is_contiguous<const D: usize>(tensor: Tensor<D>) -> bool {
        let tensor = if tensor.is_autodiff() {
            tensor.inner()
        } else {
            tensor
        };
        tensor
            .try_into_primitive::<Flex>()
            .expect("a tensor of Flex")
            .is_contiguous()
    }
    let model = Mlp::new();
    assert!(
        !is_contiguous(model.layers[0].weight.val().transpose()),
        "it can be told"
    );
    for dim in [0, 1] {
        MeshTest::new([2], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let place =
                move |param: ParamInfo| Some(Placement::Shard(dim.min(param.shape.len() - 1)));
            let config = FullyShard::new().with_shard_placement_fn(place);
            let sharded = fully_shard(on_device(&model, &device), mesh, config)?;
            let output = unit(&sharded, batch(0, mesh.rank(), &device), |mlp, x| {
                for layer in &mlp.layers {
                    assert!(
                        is_contiguous(layer.weight.val()),
                        "a whole, cut along {dim}"
                    );
                }
                mlp.layers
                    .iter()
                    .fold(x, |x, layer| layer.forward(x).tanh())
            });
            let grads = loss(output).backward();
            for layer in &sharded.layers {
                assert_eq!(
                    layer.weight.shard().expect("it is sharded").placements(),
                    [Placement::Shard(dim)]
                );
                assert!(is_contiguous(layer.weight.base()), "a shard along {dim}");
                let grad = layer.weight.shard_grad(&grads).expect("it is trained");
                assert!(is_contiguous(grad.to_local()), "a gradient along {dim}");
            }
            Ok(())
        });
    }
}
