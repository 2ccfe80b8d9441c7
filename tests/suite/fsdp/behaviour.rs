//! What a model may do between its units.

use burn::module::{Lora, Module, Param};
use burn::nn::{Initializer, Linear, LinearConfig, RmsNormConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, Tolerance};
use burn_dtensor::comm::{Launch, Op, Phase, World, launch};
use burn_dtensor::fsdp::{
    FsdpError, FullyShard, ParamExt, ParamInfo, ReshardAfterForward, full_model, fully_shard, named_parameters,
    reshard, unit, unshard,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::param::ParamError;
use burn_dtensor::placement::{PartialOp, Placement};
use burn_dtensor::{Error, Result};
use itertools::iproduct;

use super::support::{Holder, max_diff, mean, on_device, tensor, values};

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    blocks: Vec<Linear>,
    scale: Param<Tensor<1>>,
    spare: Linear,
}

/// How a test runs [`Net`].
type Forward = fn(&Net, Tensor<2>, usize) -> Tensor<2>;

const WIDTH: usize = 5;

fn net(device: &Device) -> Net {
    device.seed(3);
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
    let net = Net {
        first: linear(),
        blocks: (0..3).map(|_| linear()).collect(),
        scale: Param::from_tensor(tensor(5, [WIDTH], device)),
        spare: linear(),
    };
    // Draw now, on one thread.
    let _ = values(&net, None);
    net
}

fn with_units(net: &Net, x: Tensor<2>, _: usize) -> Tensor<2> {
    unit(net, x, |net, x| {
        let mut x = net.first.forward(x);
        for block in &net.blocks {
            x = unit(block, x, |block, x| block.forward(x).tanh());
        }
        x * net.scale.val().unsqueeze()
    })
}

fn mesh(world: &World) -> Result<DeviceMesh> {
    Ok(DeviceMesh::new(world, [world.size()], ["shard"])?)
}

fn config() -> FullyShard {
    FullyShard::new().units(["blocks.*", "spare"])
}

/// Outputs on each rank, and gradients: whole and averaged.
fn compare(ranks: usize, prepare: fn(Net) -> Net, config: FullyShard, forward: Forward) {
    for checkpointing in [false, true] {
        let model = net(&Device::flex());
        let results = launch(Launch::threads(ranks), |world| {
            let device = world.device().clone().autodiff();
            let device = if checkpointing { device.gradient_checkpointing() } else { device };
            let plain = prepare(on_device(&model, &device));
            let sharded = fully_shard(plain.clone(), &mesh(world)?, config.clone())?;
            let x = || tensor(world.rank() as u64 + 1, [4, WIDTH], &device);
            let run = |model: &Net| {
                let output = forward(model, x(), world.rank());
                let loss = (output.clone() * output.clone()).sum();
                let grads = GradientsParams::from_grads(loss.backward(), model);
                (output.into_data().try_to_vec::<f32>().unwrap(), grads)
            };
            let (expected, plain_grads) = run(&plain);
            let (output, mut grads) = run(&sharded);
            assert_eq!(output, expected);
            let holder = sharded.clone().map(&mut Holder(&mut grads));
            Ok::<_, Error>((values(&full_model(&holder)?, None), values(&plain, Some(&plain_grads))))
        })
        .unwrap();
        let mean = mean(results.iter().map(|(_, expected)| expected));
        for (grads, _) in &results {
            let diff = max_diff(grads, &mean);
            assert!(diff < 1e-5, "gradients differ by {diff}, checkpointing {checkpointing}");
        }
    }
}

#[test]
fn units_on_any_number_of_ranks() {
    for ranks in [1, 2, 3, 4, 7] {
        compare(ranks, |net| net, config(), with_units);
    }
}

#[test]
fn a_model_without_unit_calls_is_right() {
    compare(
        3,
        |net| net,
        FullyShard::new(),
        |net, x, _| {
            let mut x = net.first.forward(x);
            for block in &net.blocks {
                x = block.forward(x).tanh();
            }
            x * net.scale.val().unsqueeze()
        },
    );
}

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
fn several_inputs_and_outputs() {
    compare(
        2,
        |net| net,
        config(),
        |net, x, _| {
            unit(net, x, |net, x| {
                let a = net.first.forward(x.clone());
                let b = x.clone() * 2.0;
                let (a, c) = unit(&net.blocks[0], (a, Some(b), 3usize), |block, (a, b, n)| {
                    assert_eq!(n, 3);
                    (block.forward(a + b.unwrap()), x)
                });
                let a = unit(&net.blocks[1], a, |block, a| block.forward(a.tanh()));
                a + c
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
                unit(&net.blocks[0], (kept, dropped), |block, (kept, _)| block.forward(kept))
            })
        },
    );
}

#[test]
fn a_unit_run_twice_adds_its_gradients() {
    compare(
        2,
        |net| net,
        config(),
        |net, x, _| {
            unit(net, x, |net, x| {
                let block = &net.blocks[0];
                let x = unit(block, x, |block, x| block.forward(x).tanh());
                unit(block, x, |block, x| block.forward(x).tanh())
            })
        },
    );
}

#[test]
fn a_weight_read_twice_is_gathered_once() {
    compare(2, |net| net, config(), |net, x, _| unit(&net.blocks[0], x, |block, x| block.forward(block.forward(x))));
}

#[test]
fn frozen_parameters_take_no_part_in_the_reduction() {
    fn freeze(mut net: Net) -> Net {
        net.blocks[0] = net.blocks[0].clone().no_grad();
        net.blocks[1].weight = net.blocks[1].weight.clone().set_require_grad(false);
        net.scale = net.scale.clone().set_require_grad(false);
        net
    }
    compare(2, freeze, config(), with_units);
}

#[test]
fn frozen_inputs_and_weights_under_a_trained_captured_tensor() {
    compare(
        2,
        |net| Net { blocks: net.blocks.into_iter().map(|block| block.no_grad()).collect(), ..net },
        config(),
        |net, x, _| {
            unit(net, x, |net, x| {
                let captured = net.first.forward(x);
                unit(&net.blocks[0], (), |block, ()| block.forward(captured))
            })
        },
    );
}

#[test]
fn ignored_parameters_stay_as_they_are() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let model = on_device(&model, &world.device().clone().autodiff());
        let sharded = fully_shard(model, &mesh(world)?, config().ignore(["spare.*"]))?;
        assert!(sharded.spare.weight.shard().is_none());
        assert_eq!(sharded.spare.weight.base().dims(), [WIDTH, WIDTH]);
        assert!(sharded.first.weight.shard().is_some());
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn inner_calls_come_first_and_keep_their_units() {
    compare_bottom_up();
}

fn compare_bottom_up() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let mesh = mesh(world)?;
        let mut sharded = plain.clone();
        sharded.blocks = sharded
            .blocks
            .into_iter()
            .map(|block| fully_shard(block, &mesh, FullyShard::new()))
            .collect::<Result<_>>()?;
        let sharded = fully_shard(sharded, &mesh, FullyShard::new())?;
        world.ledger().reset();
        let x = tensor(1, [4, WIDTH], &device);
        let output = with_units(&sharded, x.clone(), 0);
        assert_eq!(output.clone().into_data(), with_units(&plain, x, 0).into_data());
        let _ = output.sum().backward();
        // Root keeps, blocks are gathered again: their units are no roots any more.
        assert_eq!(world.ledger().calls_in(Op::AllGather, Phase::Forward), 4);
        assert_eq!(world.ledger().calls_in(Op::AllGather, Phase::Backward), 3);
        let again = fully_shard(sharded, &mesh, FullyShard::new());
        assert!(matches!(again, Err(Error::Fsdp(FsdpError::AlreadySharded { .. }))));
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn inference_without_autodiff() {
    let model = net(&Device::flex());
    launch(Launch::threads(3), |world| {
        let device = world.device().clone();
        let expected = with_units(&model, tensor(1, [4, WIDTH], &device), 0);
        let sharded = fully_shard(on_device(&model, &device.clone().autodiff()), &mesh(world)?, config())?;
        let output = with_units(&sharded.valid(), tensor(1, [4, WIDTH], &device), 0);
        assert_eq!(output.into_data(), expected.clone().into_data());
        let plain = fully_shard(on_device(&model, &device), &mesh(world)?, config())?;
        let output = with_units(&plain, tensor(1, [4, WIDTH], &device), 0);
        assert_eq!(output.into_data(), expected.into_data());
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn lazy_parameters_take_the_first_ranks_values() {
    let weights = launch(Launch::threads(4), |world| {
        let device = world.device().clone().autodiff();
        let value = 10.0 + world.rank() as f64;
        let lazy = LinearConfig::new(WIDTH, 7).with_initializer(Initializer::Constant { value }).init(&device);
        let sharded = fully_shard(lazy.clone(), &mesh(world)?, FullyShard::new())?;
        if world.rank() > 0 {
            assert!(!lazy.weight.is_initialized(), "only the first rank makes values");
        }
        assert!(sharded.weight.base().is_require_grad());
        Ok::<_, Error>(full_model(&sharded)?.weight.val().into_data().try_to_vec::<f32>().unwrap())
    })
    .unwrap();
    assert!(weights.iter().all(|weight| *weight == [10.0; WIDTH * 7]));
}

#[test]
fn another_clones_shards_are_not_the_scopes() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let sharded = fully_shard(plain.clone(), &mesh(world)?, config())?;
        let teacher = sharded.clone().map(&mut Shift);
        let x = tensor(1, [4, WIDTH], &device);
        // Read inside the student's scope, whose unit it shares.
        let output = unit(&sharded.blocks[0], x.clone(), |block, x| {
            let frozen = block.clone().no_grad();
            block.forward(x.clone()) + teacher.blocks[0].forward(x.clone()) + frozen.forward(x)
        });
        let shifted = plain.clone().map(&mut Shift);
        let student = plain.blocks[0].forward(x.clone());
        let expected = student.clone() + shifted.blocks[0].forward(x.clone()) + student;
        assert_eq!(output.clone().into_data(), expected.into_data());
        let grads = output.sum().backward();
        let grad = sharded.blocks[0].bias.as_ref().unwrap().base().grad(&grads).expect("trained").into_data();
        let rows: Vec<f32> = grad.try_to_vec().unwrap();
        assert!(rows.iter().all(|row| *row == 4.0), "the frozen clone adds nothing: {rows:?}");
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn part_of_a_unit_can_be_gathered() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let plain = on_device(&model, &world.device().clone().autodiff());
        let sharded = fully_shard(plain.clone(), &mesh(world)?, FullyShard::new())?;
        let spare = full_model(&sharded.spare)?;
        assert_eq!(spare.weight.val().into_data(), plain.spare.weight.val().into_data());
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn a_weight_may_leave_its_unit_as_an_output() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let always = config().reshard_after_forward(ReshardAfterForward::Always);
        let sharded = fully_shard(plain.clone(), &mesh(world)?, always)?;
        let kept = unit(&sharded.blocks[0], (), |block, ()| block.weight.val().inner());
        world.ledger().reset();
        let view = unit(&sharded.blocks[1], (), |block, ()| block.weight.val().transpose());
        let loss = (view.clone() * view).sum() + kept.clone().sum();
        assert_eq!(world.ledger().calls(Op::AllGather), 1, "reading the output gathers nothing");
        let grads = loss.backward();
        let grad = sharded.blocks[1].weight.base().grad(&grads).expect("trained");
        assert_eq!(grad.into_data(), (sharded.blocks[1].weight.base().inner() * 2.0).into_data());
        assert_eq!(kept.into_data(), plain.blocks[0].weight.val().into_data());
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// A copy: it neither waits for what the unit gathers for backward nor keeps it.
#[test]
fn a_frozen_weight_may_leave_its_unit_as_an_output() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let always = config().reshard_after_forward(ReshardAfterForward::Always);
        let sharded = fully_shard(on_device(&model, &device), &mesh(world)?, always)?;
        let frozen = sharded.blocks[0].clone().no_grad();
        world.ledger().reset();
        let x = tensor(1, [3, WIDTH], &device).require_grad();
        let (y, weight) = unit(&frozen, x.clone(), |block, x| (block.forward(x), block.weight.val()));
        assert!(!weight.is_tracked() && weight.is_autodiff());
        assert_eq!(weight.into_data(), model.blocks[0].weight.val().into_data());
        assert_eq!(world.ledger().calls(Op::AllGather), 1, "reading it gathers nothing");
        assert!(x.grad(&y.sum().backward()).is_some());
        assert_eq!(world.ledger().calls(Op::AllGather), 2);
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// Also of weights in no slot, which only the forward under way has.
#[test]
fn a_backward_inside_its_units_own_forward() {
    let model = LinearConfig::new(WIDTH, WIDTH).init(&Device::flex());
    launch(Launch::threads(2), |world| {
        for (placement, checkpointing) in iproduct!([Placement::Shard(0), Placement::Replicate], [false, true]) {
            let device = world.device().clone().autodiff();
            let device = if checkpointing { device.gradient_checkpointing() } else { device };
            let plain = on_device(&model, &device);
            let always = FullyShard::new().reshard_after_forward(ReshardAfterForward::Always);
            let sharded =
                fully_shard(plain.clone(), &mesh(world)?, always.shard_placement_fn(move |_| Some(placement)))?;
            let grads = |model: &Linear| {
                let x = tensor(1, [3, WIDTH], &device).require_grad();
                let mut grads = None;
                unit(model, x.clone(), |linear, x| {
                    let y = linear.forward(linear.forward(x).tanh());
                    grads = Some(y.square().mean().backward());
                });
                let mut grads = grads.expect("just made");
                let own = x.grad_remove(&mut grads).expect("tracked").into_data();
                (own, GradientsParams::from_grads(grads, model))
            };
            let ((found, mut shards), (expected, whole)) = (grads(&sharded), grads(&plain));
            found.assert_approx_eq::<f32>(&expected, Tolerance::default());
            let found = values(&full_model(&sharded.map(&mut Holder(&mut shards)))?, None);
            assert!(max_diff(&found, &values(&plain, Some(&whole))) < 1e-6, "{placement} {checkpointing}");
        }
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn a_dimension_of_one_is_kept_by_a_few_ranks() {
    launch(Launch::threads(4), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&LinearConfig::new(WIDTH, 1).init(&device), &device);
        let few = FullyShard::new().reshard_after_forward(ReshardAfterForward::Ranks(2));
        let sharded = fully_shard(plain, &mesh(world)?, few)?;
        let x = tensor(1, [4, WIDTH], &device);
        let output = unit(&sharded, x, |linear, x| linear.forward(x) * linear.bias.as_ref().unwrap().val().unsqueeze());
        let grads = GradientsParams::from_grads(output.sum().backward(), &sharded);
        assert_eq!(grads.len(), 2);
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn unshard_gathers_ahead_and_reshard_lets_go() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let sharded = fully_shard(plain.clone(), &mesh(world)?, config())?;
        let gathers = || world.ledger().calls(Op::AllGather);
        world.ledger().reset();
        unshard(&sharded.blocks[0])?.wait()?;
        let pending = unshard(&sharded.blocks[1])?;
        drop(pending);
        assert_eq!(gathers(), 2);
        let x = tensor(1, [4, WIDTH], &device);
        let output = with_units(&sharded, x.clone(), 0);
        assert_eq!(output.into_data(), with_units(&plain, x.clone(), 0).into_data());
        assert_eq!(gathers(), 4, "the root and the third block gather; the others were");
        unshard(&sharded.blocks[0])?.wait()?;
        reshard(&sharded.blocks[0])?;
        let _ = unit(&sharded.blocks[0], x.clone(), |block, x| block.forward(x));
        assert_eq!(gathers(), 6, "what was let go is gathered again");
        // A step makes what was gathered stale.
        unshard(&sharded.blocks[0])?.wait()?;
        let stepped = sharded.clone().map(&mut Shift);
        let output = unit(&stepped.blocks[0], x.clone(), |block, x| block.forward(x));
        assert_eq!(output.into_data(), plain.map(&mut Shift).blocks[0].forward(x).into_data());
        assert!(matches!(unshard(&model), Err(Error::Param(ParamError::NotSharded))));
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// An optimizer of sorts: new leaves.
struct Shift;

impl burn::module::ModuleMapper for Shift {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|base| Tensor::from_data((base.inner() + 1.0).into_data(), &Device::flex().autodiff()).require_grad())
    }
}

#[test]
fn parameters_are_dtensors() {
    let model = net(&Device::flex());
    launch(Launch::threads(4), |world| {
        let model = on_device(&model, &world.device().clone().autodiff());
        let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
        let config = config()
            .shard_placement_fn(|param: ParamInfo| param.path.ends_with("1.weight").then_some(Placement::Shard(1)));
        let sharded = fully_shard(model.clone(), &mesh, config)?;
        let weight = sharded.blocks[0].weight.shard().expect("sharded");
        assert_eq!(weight.placements(), [Placement::Replicate, Placement::Shard(0)]);
        assert_eq!(weight.dims(), [WIDTH, WIDTH]);
        assert_eq!(weight.to_local().dims(), [[3, 2][mesh.coordinate().unwrap()[1]], WIDTH]);
        let weight = sharded.blocks[1].weight.shard().expect("sharded");
        assert_eq!(weight.placements(), [Placement::Replicate, Placement::Shard(1)]);
        assert_eq!(weight.full_tensor()?.into_data(), model.blocks[1].weight.val().into_data());

        let named = named_parameters(&sharded);
        let paths: Vec<_> = named.iter().map(|param| param.path.as_str()).collect();
        assert_eq!(paths.len(), 2 + 3 * 2 + 1 + 2);
        assert_eq!(&paths[..4], ["first.weight", "first.bias", "blocks.0.weight", "blocks.0.bias"]);
        let second = named.iter().find(|param| param.path == "blocks.1.weight").expect("listed");
        assert_eq!((&*second.unit, second.id), ("blocks.1", sharded.blocks[1].weight.id));
        assert!(second.shard::<1>().is_none());
        let whole = second.shard::<2>().expect("a matrix").full_tensor()?;
        assert_eq!(whole.into_data(), model.blocks[1].weight.val().into_data());
        assert_eq!(&*named[0].unit, "root");
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn wrong_configurations_are_typed_errors() {
    let model = net(&Device::flex());
    launch(Launch::threads(4), |world| {
        let shard = |config: FullyShard| {
            let mesh = DeviceMesh::new(world, [4], ["shard"]).unwrap();
            fully_shard(model.clone(), &mesh, config).map(|_| ()).expect_err("it is wrong")
        };
        let error = shard(FullyShard::new().units(["layers.*"]));
        assert!(
            matches!(&error, Error::Param(ParamError::NoMatch { pattern, .. }) if pattern == "layers.*"),
            "{error}"
        );
        assert!(error.to_string().contains("`blocks.0`"), "{error}");
        let error = shard(FullyShard::new().ignore(["blocks.9.weight"]));
        assert!(matches!(error, Error::Param(ParamError::NoMatch { what: "parameter", .. })));
        assert!(matches!(shard(FullyShard::new().units(["a.[b"])), Error::Param(ParamError::Pattern { .. })));
        let error = shard(FullyShard::new().reshard_after_forward(ReshardAfterForward::Ranks(3)));
        assert!(matches!(error, Error::Fsdp(FsdpError::ReshardRanks { ranks: 3, size: 4, .. })), "{error}");
        for placement in [Placement::Shard(2), Placement::Partial(PartialOp::Sum)] {
            let error = shard(FullyShard::new().shard_placement_fn(move |_| Some(placement)));
            assert!(
                matches!(&error, Error::Fsdp(FsdpError::Placement { param, .. }) if param.contains('.')),
                "{error}"
            );
        }
        let mesh = DeviceMesh::new(world, [4], ["shard"])?;
        let norm = RmsNormConfig::new(8).init(world.device());
        let error = fully_shard(norm, &mesh, FullyShard::new().shard_placement_fn(|_| Some(Placement::Shard(0))));
        assert!(matches!(error, Err(Error::Fsdp(FsdpError::StoredShape { module: "RmsNorm", .. }))));
        let lora = model.clone().apply_lora(Lora::new(2, 4.0));
        let error = fully_shard(lora, &mesh, FullyShard::new());
        assert!(matches!(error, Err(Error::Param(ParamError::Reparameterized { .. }))));
        let mesh = DeviceMesh::new(world, [2, 2, 1], ["a", "b", "c"])?;
        let error = fully_shard(model.clone(), &mesh, FullyShard::new());
        assert!(matches!(error, Err(Error::Fsdp(FsdpError::MeshDims { .. }))));
        Ok::<_, Error>(())
    })
    .unwrap();
}
