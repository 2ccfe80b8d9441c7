//! Units of several modules.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::{Launch, Op, World, launch};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{
    FsdpError, FsdpModule, FullyShard, MixedPrecisionPolicy, ParamInfo, ParamPlacement,
    ReshardAfterForward, full_model, fully_shard, named_parameters, record_events, remesh, unit,
    unshard,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::{Plan, parallelize};
use burn_dtensor::placement::Placement;
use burn_dtensor::{Error, Result};

use super::events::trace;
use super::support::{Holder, elements, max_diff, mean, on_device, tensor, values};
use crate::launched;

const WIDTH: usize = 5;

#[derive(Module, Debug)]
struct Net {
    embed: Linear,
    blocks: Vec<Linear>,
    norm: LayerNorm,
    head: Linear,
    /// Nothing runs it.
    spare: Linear,
}

impl Net {
    fn init() -> Self {
        let device = Device::flex();
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device);
        let norm = LayerNormConfig::new(WIDTH).init(&device);
        let net = Self {
            embed: linear(),
            blocks: vec![linear(), linear()],
            norm,
            head: linear(),
            spare: linear(),
        };
        let _ = values(&net, None);
        net
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, Self::layers)
    }

    fn layers(&self, x: Tensor<2>) -> Tensor<2> {
        let mut x = unit(&self.embed, x, |embed, x| embed.forward(x).tanh());
        for block in &self.blocks {
            x = unit(block, x, |block, x| block.forward(x).tanh());
        }
        let x = unit(&self.norm, x, |norm, x| norm.forward(x));
        unit(&self.head, x, |head, x| head.forward(x))
    }
}

/// Modules that are one unit each.
const FAR: &[&[&str]] = &[&["embed", "head"]];
const NEAR: &[&[&str]] = &[&["norm", "head"]];
const TWO: &[&[&str]] = &[&["embed", "blocks.0"], &["nor?", "head"]];
const UNUSED: &[&[&str]] = &[&["head", "spare"]];

fn config(groups: &[&[&str]]) -> FullyShard {
    let config = FullyShard::new().with_reshard_after_forward(ReshardAfterForward::Always);
    let config = if groups == TWO {
        config.with_units(["blocks.1"])
    } else {
        config.with_units(["blocks.*"])
    };
    groups.iter().fold(config, |config, group| {
        config.with_group_unit(group.iter().copied())
    })
}

fn sharded(net: &Net, world: &World, device: &Device, config: FullyShard) -> Result<Net> {
    let mesh = match world.size() {
        4 => DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?,
        ranks => DeviceMesh::new(world, [ranks], ["shard"])?,
    };
    fully_shard(on_device(net, device), &mesh, config)
}

fn batch(rank: usize, device: &Device) -> Tensor<2> {
    tensor(rank as u64 + 1, [3, WIDTH], device)
}

fn grads(model: &Net, rank: usize, device: &Device) -> GradientsParams {
    GradientsParams::from_grads(
        model.forward(batch(rank, device)).square().sum().backward(),
        model,
    )
}

fn full(model: &Net, mut grads: GradientsParams) -> Result<BTreeMap<String, Vec<f32>>> {
    Ok(values(
        &full_model(&model.clone().map(&mut Holder(&mut grads)))?,
        None,
    ))
}

#[test]
fn gradients_are_those_of_the_unsharded_model() {
    let net = Net::init();
    for ranks in [1, 2, 3, 4] {
        let device = Device::flex().autodiff();
        let plain = on_device(&net, &device);
        let of_rank = |rank| values(&plain, Some(&grads(&plain, rank, &device)));
        let expected = mean((0..ranks).map(of_rank).collect::<Vec<_>>().iter());
        for groups in [FAR, NEAR, TWO, UNUSED] {
            for checkpointing in [false, true] {
                let all = launch(Launch::threads(ranks), |world| {
                    let device = world.device().clone().autodiff();
                    let device = if checkpointing {
                        device.gradient_checkpointing()
                    } else {
                        device
                    };
                    let model = sharded(&net, world, &device, config(groups))?;
                    // Three times: what a module leaves open that never runs, is closed.
                    for _ in 0..2 {
                        drop(grads(&model, world.rank(), &device));
                    }
                    world.ledger().reset();
                    let grads = grads(&model, world.rank(), &device);
                    let calls = |op| world.ledger().calls(op);
                    // Two blocks, the model, and a unit for each group; of two blocks one is in a
                    // group.
                    let units = if groups == TWO {
                        4
                    } else {
                        2 + 1 + groups.len() as u64
                    };
                    if ranks > 1 {
                        assert_eq!(
                            (calls(Op::AllGather), calls(Op::ReduceScatter)),
                            (2 * units, units),
                            "{groups:?}"
                        );
                    }
                    full(&model, grads)
                });
                for grads in launched::values(all.unwrap()) {
                    let diff = max_diff(&grads, &expected);
                    assert!(
                        diff < 1e-5,
                        "{groups:?} on {ranks} ranks, checkpointing {checkpointing}: {diff}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_group_is_open_from_its_first_module_to_its_last() {
    for (groups, forward, backward) in [
        (
            FAR,
            "U Ueh U0 R0 U1 R1 Reh R",
            "U Ueh U1 U0 R1 B1 R0 B0 Reh Beh R B",
        ),
        (
            NEAR,
            "U U0 R0 U1 R1 Unh Rnh R",
            "U Unh U1 Rnh Bnh U0 R1 B1 R0 B0 R B",
        ),
        (
            TWO,
            "U Ue0 Re0 U1 R1 Unh Rnh R",
            "U Unh U1 Rnh Bnh Ue0 R1 B1 Re0 Be0 R B",
        ),
        // With the module in which it was opened.
        (
            UNUSED,
            "U U0 R0 U1 R1 Uhs Rhs R",
            "U Uhs U1 Rhs Bhs U0 R1 B1 R0 B0 R B",
        ),
    ] {
        launch(Launch::threads(2), |world| {
            let device = world.device().clone().autodiff();
            let model = sharded(&Net::init(), world, &device, config(groups))?;
            for _ in 0..3 {
                let x = batch(world.rank(), &device).require_grad();
                let (loss, events) = record_events(|| model.forward(x).sum());
                assert_eq!(trace(&events), forward, "{groups:?}");
                let (_, events) = record_events(|| loss.backward());
                assert_eq!(trace(&events), backward, "{groups:?}");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn with_nothing_around_them_modules_gather_their_own() {
    let net = Net::init();
    let all = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let model = sharded(&net, world, &device, config(FAR))?;
        let step = |model: &Net| {
            let output = unit(
                &model.head,
                unit(&model.embed, batch(0, &device), through),
                through,
            );
            GradientsParams::from_grads(output.square().sum().backward(), model)
        };
        world.ledger().reset();
        let own = step(&model);
        assert_eq!(
            (
                world.ledger().calls(Op::AllGather),
                world.ledger().calls(Op::ReduceScatter)
            ),
            (4, 2)
        );
        let plain = on_device(&net, &device);
        Ok((full(&model, own)?, values(&plain, Some(&step(&plain)))))
    });
    for (grads, expected) in launched::values(all.unwrap()) {
        assert!(max_diff(&grads, &expected) < 1e-6);
    }
}

/// A pass of one of them is not the place of all gradients that wait in the unit.
#[test]
fn with_nothing_around_them_modules_accumulate_their_own() {
    let net = Net::init();
    let all = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let model = sharded(&net, world, &device, config(FAR))?;
        let steps = |model: &Net| {
            let mut grads = GradientsAccumulator::new();
            for step in 0..4 {
                if let Ok(model) = FsdpModule::of(model) {
                    model.set_requires_gradient_sync(step == 3);
                }
                let output = unit(
                    &model.head,
                    unit(&model.embed, batch(step, &device), through),
                    through,
                );
                let of_batch = output.square().sum().backward();
                grads.accumulate(model, GradientsParams::from_grads(of_batch, model));
            }
            grads.grads()
        };
        let plain = on_device(&net, &device);
        Ok((
            full(&model, steps(&model))?,
            values(&plain, Some(&steps(&plain))),
        ))
    });
    for (grads, expected) in launched::values(all.unwrap()) {
        assert!(max_diff(&grads, &expected) < 1e-5);
    }
}

/// A layer as it is.
fn through(layer: &Linear, x: Tensor<2>) -> Tensor<2> {
    layer.forward(x)
}

#[test]
fn a_forward_without_autodiff_gathers_a_group_once() {
    let net = Net::init();
    let all = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let model = sharded(&net, world, &device, config(FAR))?.valid();
        world.ledger().reset();
        let output = model.forward(batch(0, world.device())).into_data();
        assert_eq!(world.ledger().calls(Op::AllGather), 4);
        Ok((output, net.forward(batch(0, world.device())).into_data()))
    });
    for (output, expected) in launched::values(all.unwrap()) {
        output.assert_eq(&expected, true);
    }
}

/// In which order they run, how often, and whether one runs inside another unit, is the program's
/// affair.
#[test]
fn modules_run_as_the_program_likes() {
    let net = Net::init();
    let forward = |net: &Net, x: Tensor<2>| {
        unit(net, x, |net, x| {
            let x = unit(&net.head, x, through).tanh();
            let x = unit(&net.head, x, through).tanh();
            let x = unit(&net.blocks[0], x, |block, x| {
                unit(&net.embed, block.forward(x), through)
            })
            .tanh();
            let x = unit(&net.blocks[1], x, through).tanh();
            // The group is open no longer.
            unit(&net.embed, x, through)
        })
    };
    let all = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let step = |model: &Net| {
            let loss = forward(model, batch(0, &device)).square().sum();
            GradientsParams::from_grads(loss.backward(), model)
        };
        let model = sharded(&net, world, &device, config(FAR))?;
        let plain = on_device(&net, &device);
        let grads = step(&model);
        Ok((full(&model, grads)?, values(&plain, Some(&step(&plain)))))
    });
    for (grads, expected) in launched::values(all.unwrap()) {
        let diff = max_diff(&grads, &expected);
        assert!(diff < 1e-5, "{diff}");
    }
}

/// A group unit whose parameters are on two meshes, so that it is two units. Frozen clones of its
/// modules run before it is open, while it is, and after; one clone has a frozen weight, on one
/// mesh, next to the trained bias on the other.
#[test]
fn frozen_clones_of_modules_of_a_group_on_two_meshes() {
    let net = Net::init();
    let frozen = |layer: &Linear| layer.clone().no_grad();
    let forward = |net: &Net, x: Tensor<2>| {
        unit(net, x, |net, x| {
            let x = unit(&frozen(&net.head), x, through).tanh();
            let x = unit(&net.embed, x, through).tanh();
            let x = unit(&frozen(&net.embed), x.clone(), through).tanh()
                + unit(&net.blocks[0], x, through);
            let half = Linear {
                weight: frozen(&net.head).weight,
                bias: net.head.bias.clone(),
            };
            let x = unit(&half, x, through).tanh();
            let x = unit(&net.head, x, through).tanh();
            unit(&frozen(&net.head), x.clone(), through) + unit(&net.blocks[1], x, through)
        })
    };
    for mesh_dims in ["node", "local"] {
        for grouped in ["head.weight", "embed.bias"] {
            let all = launch(Launch::threads(4), |world| {
                let device = world.device().clone().autodiff();
                let step = |model: &Net| {
                    let loss = forward(model, batch(0, &device)).square().sum();
                    GradientsParams::from_grads(loss.backward(), model)
                };
                let mesh = DeviceMesh::new(world, [2, 2], ["node", "local"])?;
                let other = move |param: ParamInfo| {
                    (param.path == grouped).then(|| {
                        ParamPlacement::from(Placement::Shard(0)).with_mesh_dims(mesh_dims)
                    })
                };
                let config = config(FAR)
                    .with_shard_dims(["node", "local"])
                    .with_shard_placement_fn(other);
                let plain = on_device(&net, &device);
                let model = fully_shard(plain.clone(), &mesh, config)?;
                let group = FsdpModule::of(&model)?
                    .paths()
                    .into_iter()
                    .filter(|path| path == "embed, head");
                assert_eq!(group.count(), 2, "one for each mesh");
                // Twice, because the second forward prefetches what followed in the first.
                drop(step(&model));
                let grads = step(&model);
                Ok((full(&model, grads)?, values(&plain, Some(&step(&plain)))))
            });
            for (grads, expected) in launched::values(all.unwrap()) {
                let diff = max_diff(&grads, &expected);
                assert!(diff < 1e-5, "{grouped} over {mesh_dims}: {diff}");
            }
        }
    }
}

/// Every module's inputs are cast, as those of a unit of its own.
#[test]
fn a_policy_casts_at_each_module() {
    let net = Net::init();
    let all = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let policy = || {
            MixedPrecisionPolicy::new()
                .with_param_dtype(DType::BF16)
                .with_reduce_dtype(DType::F32)
                .with_output_dtype(DType::F32)
        };
        let step = |config: FullyShard| {
            let model = sharded(
                &net,
                world,
                &device,
                config.with_mixed_precision_for(["embed", "head"], policy()),
            )?;
            let output = model.forward(batch(world.rank(), &device));
            assert_eq!(output.dtype(), DType::F32);
            let bits = output
                .clone()
                .into_data()
                .iter::<f32>()
                .map(f32::to_bits)
                .collect::<Vec<_>>();
            let grads = GradientsParams::from_grads(output.sum().backward(), &model);
            Ok::<_, Error>((bits, elements::<f32>(&model, Some(&grads))))
        };
        let single = FullyShard::new().with_units(["blocks.*", "embed", "head"]);
        Ok((step(config(FAR))?, step(single)?))
    });
    for (grouped, single) in launched::values(all.unwrap()) {
        assert_eq!(grouped, single);
    }
}

#[test]
fn a_group_stays_one_on_other_meshes() {
    launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let device = world.device().clone().autodiff();
        let model = fully_shard(
            on_device(&Net::init(), &device),
            &mesh.slice("dp")?,
            config(FAR),
        )?;
        let paths = ["embed, head", "blocks.0", "blocks.1", "root"];
        let sorted = |model: &Net| {
            let mut paths = FsdpModule::of(model)?.paths();
            paths.sort();
            Ok::<_, Error>(paths)
        };
        let mut expected = paths.map(str::to_string);
        expected.sort();
        assert_eq!(sorted(&model)?, expected);
        assert_eq!(
            sorted(&remesh(model.clone(), &mesh.slice("dp")?)?)?,
            expected
        );
        let unit_of = |model: &Net, path: &str| {
            let named = named_parameters(model)?;
            Ok::<_, Error>(
                named
                    .iter()
                    .find(|named| &*named.path == path)
                    .map(|named| named.unit.to_string()),
            )
        };
        assert_eq!(
            unit_of(&model, "head.weight")?.as_deref(),
            Some("embed, head")
        );
        let both = parallelize(model, &mesh.slice("tp")?, Plan::new())?;
        assert_eq!(sorted(&both)?, expected);
        // An inner call's group is called by its paths in the model around it.
        let inner = fully_shard(
            on_device(&Net::init(), &device),
            &mesh.slice("dp")?,
            config(FAR),
        )?;
        let outer = fully_shard(vec![inner], &mesh.slice("dp")?, FullyShard::new())?;
        assert!(
            FsdpModule::of(&outer)?
                .paths()
                .contains(&"0.embed, 0.head".to_string())
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn wrong_groups_are_typed_errors() {
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let refused = |config: FullyShard| sharded(&Net::init(), world, &device, config).expect_err("it is wrong");
        for config in
            [FullyShard::new().with_units(["head"]).with_group_unit(["embed", "head"]), config(&[FAR[0], NEAR[0]])]
        {
            let error = refused(config);
            let is_told = matches!(&error, Error::Fsdp(FsdpError::ModuleInTwoUnits { module, .. }) if module == "head");
            assert!(is_told, "{error}");
        }
        let error = refused(FullyShard::new().with_group_unit(["embed", "haed"]));
        assert!(matches!(&error, Error::Param(ParamError::NoMatch { pattern, .. }) if pattern == "haed"), "{error}");
        let model = sharded(&Net::init(), world, &device, config(FAR))?;
        let error = unshard(&model.head).expect_err("the others are not at hand");
        assert!(
            matches!(&error, Error::Param(ParamError::UnshardOnGroupUnit { unit }) if unit == "embed, head"),
            "{error}"
        );
        // What the error says.
        FsdpModule::of(&model)?.own().set_forward_prefetch([FsdpModule::of(&model.head)?]);
        let (_, events) = record_events(|| model.forward(batch(0, &device)));
        assert_eq!(trace(&events), "U Ueh U0 R0 U1 R1 Reh R");
        Ok(())
    })
    .unwrap();
}
