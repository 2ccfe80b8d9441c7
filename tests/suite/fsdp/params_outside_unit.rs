//! Weights that a program keeps, reads elsewhere or never uses.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::comm::{CommError, Launch, Op, Phase, World, launch};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{
    FullyShard, ParamExt, ReshardAfterForward, TensorTree, full_model, fully_shard, unit, unshard,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::{Plan, Style, parallelize};
use burn_dtensor::{Error, Result};

use super::support::{on_device, tensor, values};
use crate::launched;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    blocks: Vec<Linear>,
}

const WIDTH: usize = 6;

fn net(device: &Device) -> Net {
    device.seed(11);
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
    let net = Net { first: linear(), blocks: (0..2).map(|_| linear()).collect() };
    let _ = values(&net, None);
    net
}

fn mesh(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [world.size()], ["shard"])
}

fn config() -> FullyShard {
    FullyShard::new().with_units(["blocks.*"])
}

/// Runs `program` on two ranks, with the model sharded and not; `prepare` comes before.
fn sharded<T: Send>(
    prepare: fn(Net) -> Net,
    config: fn() -> FullyShard,
    program: impl Fn(&World, &Net, &Net) -> Result<T> + Sync,
) -> Vec<T> {
    let model = net(&Device::flex());
    let ranks = launch(Launch::threads(2), |world| {
        let plain = prepare(on_device(&model, &world.device().clone().autodiff()));
        let sharded = fully_shard(plain.clone(), &mesh(world)?, config())?;
        program(world, &sharded, &plain)
    });
    ranks.map(launched::values).unwrap()
}

fn bias(linear: &Linear) -> Tensor<1> {
    linear.bias.as_ref().expect("made with a bias").val()
}

fn x(world: &World) -> Tensor<2> {
    tensor(world.rank() as u64 + 1, [3, WIDTH], &world.device().clone().autodiff())
}

#[test]
fn the_data_of_a_weight_kept_past_its_unit_outlives_backward() {
    sharded(
        |net| net,
        config,
        |world, net, plain| {
            let mut kept = None;
            let y = unit(&net.blocks[0], x(world), |block, x| {
                kept = Some(bias(block));
                block.forward(x)
            });
            let data: TensorData = kept.take().expect("set in forward").into_data();
            let slice = data.as_slice::<f32>().expect("f32");
            let _ = y.sum().backward();
            // Whoever gets the memory next.
            let _other: Vec<_> = (0..64).map(|_| vec![7.0f32; WIDTH]).collect();
            assert_eq!(slice, bias(&plain.blocks[0]).into_data().as_slice::<f32>().expect("f32"));
            Ok(())
        },
    );
}

#[test]
fn a_weight_may_be_read_while_another_thread_runs_backward() {
    sharded(
        |net| net,
        || config().with_reshard_after_forward(ReshardAfterForward::Always),
        |world, net, plain| {
            let mut kept = None;
            let y = unit(&net.blocks[0], x(world), |block, x| {
                kept = Some(block.weight.val());
                block.forward(x)
            });
            let (kept, loss) = (kept.expect("set in forward").detach(), y.sum());
            let expected = (plain.blocks[0].weight.val() * 2.0).into_data();
            let grads = std::thread::scope(|scope| {
                let backward = scope.spawn(|| GradientsParams::from_grads(loss.backward(), net));
                for _ in 0..200 {
                    assert_eq!((kept.clone() * 2.0).into_data(), expected);
                }
                backward.join().expect("backward does not fail")
            });
            assert_eq!(grads.len(), 2);
            assert_eq!((kept * 2.0).into_data(), expected, "and after it");
            Ok(())
        },
    );
}

#[test]
fn one_rank_may_print_a_kept_weight() {
    sharded(
        |net| net,
        config,
        |world, net, plain| {
            let mut kept = None;
            let y = unit(&net.blocks[0], x(world), |block, x| {
                kept = Some(block.weight.val());
                block.forward(x)
            });
            if world.rank() == 0 {
                let kept = kept.expect("set in forward");
                assert_eq!(kept.into_data(), plain.blocks[0].weight.val().into_data());
            }
            let gathers = || world.ledger().calls_in(Op::AllGather, Phase::Backward);
            assert_eq!(gathers(), 1 - world.rank() as u64);
            let _ = y.sum().backward();
            assert_eq!(gathers(), 1, "backward reads what was gathered for the print");
            Ok(())
        },
    );
}

/// A reader that is shallower than its unit's token: of a frozen weight, and of a detached one.
#[test]
fn a_frozen_weight_with_a_captured_shallower_activation() {
    let frozen = |net: Net| Net { blocks: net.blocks.into_iter().map(Module::no_grad).collect(), ..net };
    type Forward = fn(&Linear, Tensor<2>) -> Tensor<2>;
    let full: Forward = |block, context| block.forward(context);
    let detached: Forward = |block, context| context.matmul(block.weight.val().detach());
    let run = |net: &Net, x: Tensor<2>, forward: Forward, alone: bool| {
        let context = net.first.forward(x);
        let deep = context.clone().tanh().tanh().tanh();
        let mut captured = None;
        let both = unit(&net.blocks[0], deep, |block, deep| {
            let shallow = forward(block, context);
            captured = Some(shallow.clone());
            shallow + deep
        });
        // Alone, nothing else of the unit is in that backward, or alive.
        let loss = if alone { captured.expect("set in forward") } else { both };
        GradientsParams::from_grads(loss.sum().backward(), net)
    };
    for (prepare, forward) in [(frozen as fn(Net) -> Net, full), (|net| net, detached)] {
        for alone in [false, true] {
            sharded(
                prepare,
                || config().with_ignored(["first.*"]),
                |world, net, plain| {
                    let grads = run(net, x(world), forward, alone);
                    let expected = run(plain, x(world), forward, alone);
                    let weight = |net: &Net, grads: &GradientsParams| {
                        grads.get::<2>(net.first.weight.id).map(Tensor::into_data).expect("trained")
                    };
                    assert_eq!(weight(net, &grads), weight(plain, &expected));
                    Ok(())
                },
            );
        }
    }
}

#[test]
fn a_frozen_weight_of_a_kept_unit_has_no_gradient_to_compute() {
    let frozen =
        |net: Net| Net { first: Linear { weight: net.first.weight.set_require_grad(false), ..net.first }, ..net };
    sharded(frozen, config, |world, net, _| {
        // The root keeps its weights.
        unit(net, x(world).require_grad(), |net, x| {
            assert!(!net.first.weight.val().is_tracked(), "its layer would save the input for it");
            assert!(bias(&net.first).is_tracked());
            x
        });
        Ok(())
    });
}

#[test]
fn another_clones_read_leaves_a_prefetch_alone() {
    sharded(
        |net| net,
        config,
        |world, net, _| {
            let teacher = net.clone().no_grad();
            let gathers = || world.ledger().calls(Op::AllGather);
            unshard(&net.blocks[0])?.wait()?;
            let _ = teacher.blocks[0].weight.val();
            let before = gathers();
            let _ = unit(&net.blocks[0], x(world), |block, x| block.forward(x));
            assert_eq!(gathers(), before, "the student reads what was gathered ahead");
            unshard(&net.blocks[0])?.wait()?;
            let (before, _) = (gathers(), full_model(&teacher)?);
            let between = gathers();
            let _ = unit(&net.blocks[0], x(world), |block, x| block.forward(x));
            assert_eq!((between - before, gathers() - between), (3, 0));
            Ok(())
        },
    );
}

/// Tensors that cannot be mapped.
struct Broken(Tensor<2>);

impl TensorTree for Broken {
    fn map_floats(self, _: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        panic!("no map of {:?}", self.0.dims())
    }
}

#[test]
fn a_unit_that_unwinds_closes_itself_and_no_other() {
    sharded(
        |net| net,
        config,
        |world, net, plain| {
            world.ledger().reset();
            let y = unit(net, x(world), |net, x| {
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    unit(&net.blocks[0], (), |_, ()| Broken(x.clone()));
                }));
                assert!(caught.is_err());
                // Still the root's: gathered once.
                net.first.forward(net.first.forward(x))
            });
            assert_eq!(world.ledger().calls(Op::AllGather), 2, "the root and the block");
            let expected = plain.first.forward(plain.first.forward(x(world)));
            assert_eq!(y.clone().into_data(), expected.into_data());
            let grads = GradientsParams::from_grads(y.sum().backward(), net);
            assert_eq!(grads.len(), 2);
            Ok(())
        },
    );
}

#[test]
fn a_call_that_fails_leaves_units_as_they_were() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let inner = fully_shard(model.blocks[0].clone(), &mesh(world)?, FullyShard::new())?;
        // Parallelized on a mesh that has no root in common with the one to shard on.
        let other = DeviceMesh::new(world, [2], ["tp"])?;
        let first = parallelize(model.first.clone(), &other, Plan::new().with_style("", Style::colwise()))?;
        let outer = |first| Net { first, blocks: vec![inner.clone()] };
        let failed = fully_shard(outer(first), &mesh(world)?, FullyShard::new());
        assert!(matches!(failed, Err(Error::Param(ParamError::Meshes { .. }))));
        let again = |model: &Linear| fully_shard(model.clone(), &mesh(world).unwrap(), FullyShard::new()).unwrap_err();
        assert!(again(&inner).to_string().contains("unit `root`"));
        let _outer = fully_shard(outer(model.first.clone()), &mesh(world)?, FullyShard::new())?;
        assert!(again(&inner).to_string().contains("unit `blocks.0`"));
        Ok(())
    })
    .unwrap();
}

/// Made before `launch`, an ignored parameter would be one leaf of one graph for all ranks.
#[test]
fn ranks_share_no_leaf_of_an_ignored_parameter() {
    let device = Device::flex().autodiff();
    let model = on_device(&net(&device), &device);
    let outcome = launch(Launch::threads(2).with_deadline(Duration::from_secs(20)), |world| {
        let net = fully_shard(model.clone(), &mesh(world)?, config().with_ignored(["first.*"]))?;
        for _ in 0..20 {
            let y = unit(&net.blocks[0], net.first.forward(x(world)), |block, x| block.forward(x));
            let grads = GradientsParams::from_grads(y.sum().backward(), &net);
            assert_eq!(grads.len(), 4);
        }
        Ok(())
    });
    outcome.unwrap();
}

/// As without sharding, and as in PyTorch.
#[test]
fn a_parameter_that_no_rank_uses_stays_where_it_is() {
    let model = net(&Device::flex());
    for size in [[1, 2], [2, 1], [2, 2]] {
        launch(Launch::threads(size[0] * size[1]), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, size, ["replicate", "shard"])?;
            // Steps alternate between two layers; the third is never used, but by the second rank at last.
            let train = |mut model: Net, one: bool| {
                let mut optim = AdamWConfig::new().with_weight_decay(0.1).init();
                for step in 0..6 {
                    let loss = unit(&model, tensor(step, [3, WIDTH], &device), |net, x| {
                        let x = if step % 2 == 0 { net.first.forward(x) } else { net.blocks[0].forward(x) };
                        if one && step == 5 && world.rank() > 0 { net.blocks[1].forward(x) } else { x }
                    });
                    let grads = GradientsParams::from_grads(loss.square().mean().backward(), &model);
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
                let close = values.iter().zip(&expected[path]).all(|(a, b)| (a - b).abs() < 1e-5);
                assert!(close, "{size:?} {path}: {values:?} for {:?}", expected[path]);
            }
            assert_eq!(trained["blocks.1.weight"], start["blocks.1.weight"]);
            let trained = values(&full_model(&train(sharded, true))?, None);
            assert_ne!(trained["blocks.1.weight"], start["blocks.1.weight"], "one rank has used it");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn parameters_read_alone_in_another_order_are_told_apart() {
    let error = launch(Launch::threads(2), |world| {
        let param = |value: f32| Param::from_tensor(Tensor::<1>::full([4], value, world.device()));
        let model = fully_shard(vec![param(1.0), param(10.0)], &mesh(world)?, FullyShard::new())?;
        for at in if world.rank() == 0 { [0, 1] } else { [1, 0] } {
            let _ = model[at].val();
        }
        Ok(())
    })
    .unwrap_err();
    assert!(matches!(&error.cause, Error::Comm(CommError::Mismatch { .. })), "{error}");
    let text = error.to_string();
    assert!(["`0 (outside its unit)`", "`1 (outside its unit)`"].iter().all(|label| text.contains(label)), "{text}");
}

#[test]
fn clones_of_one_parameter_are_refused() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let tied = || Net { blocks: vec![model.first.clone(), model.blocks[0].clone()], ..model.clone() };
        let configs = [FullyShard::new(), config(), FullyShard::new().with_ignored(["first.*"])];
        let sharded = configs.map(|config| fully_shard(tied(), &mesh(world)?, config));
        for refused in sharded.into_iter().chain([parallelize(tied(), &mesh(world)?, Plan::new())]) {
            let error = refused.map(|_| ()).unwrap_err();
            let Error::Param(ParamError::Tied { param, other }) = &error else { panic!("{error}") };
            assert_eq!((param.as_str(), other.as_str()), ("first.weight", "blocks.0.weight"));
        }
        // Left to burn altogether: one leaf, of whose gradient the optimizer sees all.
        let device = world.device().clone().autodiff();
        let grad = |net: &Net| {
            let x = tensor(1, [3, WIDTH], &device);
            let y = net.first.forward(x.clone()) * 2.0 + net.blocks[0].forward(x);
            GradientsParams::from_grads(y.square().mean().backward(), net).get::<2>(net.first.weight.id)
        };
        let plain = on_device(&tied(), &device);
        let full = Net { blocks: vec![plain.first.clone(), plain.blocks[1].clone()], ..plain };
        let ignored =
            fully_shard(full.clone(), &mesh(world)?, FullyShard::new().with_ignored(["first.*", "blocks.0.*"]))?;
        assert!(ignored.blocks[1].weight.shard().is_some());
        assert_eq!(grad(&ignored).unwrap().into_data(), grad(&full).unwrap().into_data());
        Ok(())
    })
    .unwrap();
}
