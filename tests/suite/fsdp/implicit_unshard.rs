//! Units that the program does not open: their modules' forward is burn's own.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, Op, Phase, Snapshot, World, launch};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{
    FullyShard, ParamExt, ReshardAfterForward, full_model, fully_shard, unit,
};
use burn_dtensor::mesh::DeviceMesh;

use super::net::{Net, WIDTH, mesh, net};
use super::support::{max_diff, mean, on_device, tensor, values};
use crate::launched;
use crate::logged::warnings;

#[derive(Module, Debug)]
struct Text {
    table: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

const LAYERS: usize = 2;

impl Text {
    fn new(device: &Device) -> Self {
        device.seed(5);
        let text = Self {
            table: EmbeddingConfig::new(7, 8).init(device),
            encoder: TransformerEncoderConfig::new(8, 12, 2, LAYERS)
                .with_dropout(0.0)
                .init(device),
            head: LinearConfig::new(8, 3).init(device),
        };
        let _ = values(&text, None);
        text
    }

    /// As burn's examples write it.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.table.forward(tokens);
        self.head
            .forward(self.encoder.forward(TransformerEncoderInput::new(x)))
    }

    /// The same, opening every unit.
    fn forward_opening(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |text, tokens| {
            let x = text.table.forward(tokens);
            let x = text.encoder.layers.iter().fold(x, |x, layer| {
                unit(layer, x, |layer, x| layer.forward(x, None, None))
            });
            text.head.forward(x)
        })
    }
}

fn tokens(rank: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::from_ints([[0, 3, 6, 2], [5, 1, rank as i32, 4]], device)
}

type Forward = fn(&Text, Tensor<2, Int>) -> Tensor<3>;

fn opened(text: &Text, tokens: Tensor<2, Int>) -> Tensor<3> {
    text.forward_opening(tokens)
}

fn by_read(text: &Text, tokens: Tensor<2, Int>) -> Tensor<3> {
    unit(text, tokens, |text, tokens| text.forward(tokens))
}

/// Three steps: losses, the trained model, and the collectives of the last step.
fn train(
    world: &World,
    mesh: &DeviceMesh,
    start: &Text,
    config: FullyShard,
    forward: Forward,
    checkpointing: bool,
) -> Result<(Vec<f32>, Values, Snapshot), Error> {
    let device = world.device().clone().autodiff();
    let device = if checkpointing {
        device.gradient_checkpointing()
    } else {
        device
    };
    let mut model = fully_shard(on_device(start, &device), mesh, config)?;
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..3 {
        world.ledger().reset();
        let loss = forward(&model, tokens(world.rank(), &device))
            .powf_scalar(2.0)
            .mean();
        losses.push(loss.clone().into_scalar());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    let collectives = world.ledger().snapshot();
    Ok((losses, values(&full_model(&model)?, None), collectives))
}

type Values = BTreeMap<String, Vec<f32>>;

fn layers() -> FullyShard {
    FullyShard::new().with_units(["encoder.layers.*"])
}

/// To the bit, and collective by collective: calls, bytes and labels.
#[test]
fn a_unit_opened_by_a_read_is_a_unit_opened() {
    let start = Text::new(&Device::flex());
    let modes = [
        ReshardAfterForward::Auto,
        ReshardAfterForward::Always,
        ReshardAfterForward::Never,
        ReshardAfterForward::Ranks(2),
    ];
    for (shape, names) in [
        (vec![2], vec!["shard"]),
        (vec![3], vec!["shard"]),
        (vec![2, 2], vec!["replicate", "shard"]),
    ] {
        for reshard in modes {
            if shape == [3] && reshard == ReshardAfterForward::Ranks(2) {
                continue;
            }
            for checkpointing in [false, true] {
                launch(Launch::threads(shape.iter().product()), |world| {
                    let mesh = DeviceMesh::new(world, shape.clone(), names.clone())?;
                    let config = || layers().with_reshard_after_forward(reshard);
                    let expected = train(world, &mesh, &start, config(), opened, checkpointing)?;
                    let (losses, weights, collectives) =
                        train(world, &mesh, &start, config(), by_read, checkpointing)?;
                    let context = format!("{shape:?} {reshard:?} checkpointing {checkpointing}");
                    assert_eq!(losses, expected.0, "{context}");
                    assert_eq!(weights, expected.1, "{context}");
                    assert_eq!(collectives, expected.2, "{context}");
                    Ok(())
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn burns_own_encoder_makes_eight_collectives_a_step() {
    let start = Text::new(&Device::flex());
    let steps = launch(Launch::threads(2), |world| {
        let (_, weights, collectives) =
            train(world, &mesh(world)?, &start, layers(), by_read, false)?;
        let calls = |op, phase| {
            collectives
                .total(|key| (key.op, key.phase) == (op, phase))
                .calls
        };
        let units = LAYERS as u64 + 1;
        assert_eq!(calls(Op::AllGather, Phase::Forward), units);
        assert_eq!(
            calls(Op::AllGather, Phase::Backward),
            units - 1,
            "the root keeps its own"
        );
        assert_eq!(calls(Op::ReduceScatter, Phase::Backward), units);
        assert_eq!(collectives.total(|_| true).calls, 3 * units - 1);
        Ok(weights)
    })
    .unwrap();
    // The same steps without sharding, gradients averaged by hand.
    let device = Device::flex().autodiff();
    let mut model = on_device(&start, &device);
    let mut optimizer = AdamWConfig::new().init();
    for _ in 0..3 {
        let loss = |rank| model.forward(tokens(rank, &device)).powf_scalar(2.0).mean();
        let grads = GradientsParams::from_grads(((loss(0) + loss(1)) / 2.0).backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    let diff = max_diff(&steps[0].1, &values(&model, None));
    assert!(diff < 1e-6, "differs by {diff}");
}

/// Runs `forward` on two ranks, with units `blocks.*`, and compares gradients with those of the
/// plain model. Returns the all-gathers of forward.
fn check(config: FullyShard, forward: fn(&Net, Tensor<2>) -> Tensor<2>) -> u64 {
    let start = net(&Device::flex());
    let results = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&start, &device);
        let sharded = fully_shard(plain.clone(), &mesh(world)?, config.clone())?;
        let x = || tensor(world.rank() as u64 + 1, [4, WIDTH], &device);
        let expected = forward(&plain, x());
        world.ledger().reset();
        let output = unit(&sharded, x(), forward);
        let gathers = world.ledger().calls_in(Op::AllGather, Phase::Forward);
        assert_eq!(output.to_data(), expected.to_data());
        let grads = |model: &Net, output: Tensor<2>| {
            let grads = output.powf_scalar(2.0).sum().backward();
            GradientsParams::from_grads(grads, model)
        };
        let expected = values(&plain, Some(&grads(&plain, expected)));
        let mut own = grads(&sharded, output);
        let holder = sharded.clone().map(&mut super::support::Holder(&mut own));
        Ok((values(&full_model(&holder)?, None), expected, gathers))
    })
    .map(launched::values)
    .unwrap();
    let mean = mean(results.iter().map(|(_, expected, _)| expected));
    for (grads, ..) in &results {
        let diff = max_diff(grads, &mean);
        assert!(diff < 1e-5, "gradients differ by {diff}");
    }
    results[0].2
}

#[test]
fn a_unit_read_again_after_another_is_gathered_again() {
    let forward = |net: &Net, x: Tensor<2>| {
        let x = net.blocks[0].forward(net.first.forward(x)).tanh();
        net.blocks[0].forward(net.blocks[1].forward(x).tanh()) * net.scale.val().unsqueeze()
    };
    assert_eq!(
        check(FullyShard::new().with_units(["blocks.*"]), forward),
        4
    );
}

#[test]
fn a_weight_kept_past_the_next_unit_stays_right() {
    let forward = |net: &Net, x: Tensor<2>| {
        let (first, second) = (net.blocks[0].weight.val(), net.blocks[1].weight.val());
        let x = net.blocks[2].forward(x).tanh();
        x.matmul(first).tanh().matmul(second)
    };
    assert_eq!(
        check(
            FullyShard::new()
                .with_units(["blocks.*"])
                .with_reshard_after_forward(ReshardAfterForward::Always),
            forward
        ),
        4
    );
}

#[test]
fn a_unit_stays_open_while_those_inside_it_are_read() {
    let start = Text::new(&Device::flex());
    launch(Launch::threads(2), |world| {
        let config = layers().with_units(["encoder.layers.*.mha", "encoder.layers.*.pwff"]);
        let (.., collectives) = train(world, &mesh(world)?, &start, config, by_read, false)?;
        for (key, total) in collectives
            .iter()
            .filter(|(key, _)| key.op == Op::AllGather)
        {
            assert_eq!(total.calls, 1, "{key:?}");
        }
        let units = 3 * LAYERS as u64 + 1;
        assert_eq!(
            collectives.total(|key| key.op == Op::ReduceScatter).calls,
            units
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_strict_model_refuses_what_is_read_outside_its_unit() {
    let start = net(&Device::flex());
    let error = launch(Launch::threads(2), |world| {
        let strict = FullyShard::new()
            .with_units(["blocks.*"])
            .with_implicit_unshard(false);
        let model = fully_shard(start.clone(), &mesh(world)?, strict)?;
        let x = tensor(1, [4, WIDTH], world.device());
        // Inside the model's own unit all others are opened by reads.
        let _ = unit(&model, x.clone(), |net, x| {
            net.blocks[1].forward(net.first.forward(x))
        });
        let _ = model.blocks[1].forward(x);
        Ok(())
    })
    .unwrap_err();
    let Error::Param(ParamError::ReadOutsideUnit { param, unit }) = &error.cause else {
        panic!("{error}")
    };
    assert_eq!((&**param, &**unit), ("blocks.1.weight", "blocks.1"));
}

#[derive(Module, Debug)]
struct Unopened {
    unopened: Vec<Linear>,
}

#[test]
fn one_warning_a_unit_names_the_first_parameter_read_outside() {
    let device = Device::flex();
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device);
    let start = Unopened {
        unopened: vec![linear(), linear(), linear()],
    };
    let _ = values(&start, None);
    let program = |world: &World| {
        let model = fully_shard(
            start.clone(),
            &mesh(world)?,
            FullyShard::new().with_units(["unopened.*"]),
        )?;
        for _ in 0..2 {
            let x = tensor(1, [4, WIDTH], world.device());
            let x = model.unopened[0].forward(x);
            // One parameter of a unit costs no more than the unit.
            let x = x.matmul(model.unopened[1].weight.val());
            // Opened inside the model's forward.
            let _ = unit(&model, x, |model, x| model.unopened[2].forward(x));
        }
        Ok(())
    };
    let own = warnings("unopened", || {
        drop(launch(Launch::threads(2), program).unwrap())
    });
    assert_eq!(own.len(), 1, "{own:?}");
    assert!(
        own[0].contains("unit `unopened.0`") && own[0].contains("first `unopened.0.weight`"),
        "{own:?}"
    );
}

/// A copy that is frozen has leaves of its own: a unit is opened for each.
#[test]
fn a_frozen_copy_next_to_its_module_is_a_separate_unit() {
    let start = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&start, &device);
        let sharded = fully_shard(
            plain.clone(),
            &mesh(world)?,
            FullyShard::new().with_units(["blocks.*"]),
        )?;
        let both = |net: &Net| vec![net.blocks[0].clone(), net.blocks[0].clone().no_grad()];
        let forward = |both: &Vec<Linear>, x| both[1].forward(both[0].forward(x));
        let x = || tensor(1, [4, WIDTH], &device);
        let expected = forward(&both(&plain), x());
        world.ledger().reset();
        let output = unit(&both(&sharded), x(), forward);
        assert_eq!(output.to_data(), expected.to_data());
        assert_eq!(world.ledger().calls(Op::AllGather), 2);
        let grad = |output: Tensor<2>, net: &Net| {
            net.blocks[0]
                .weight
                .base()
                .grad(&output.sum().backward())
                .unwrap()
        };
        let expected = grad(expected, &plain);
        let own = grad(output, &sharded);
        let rows = sharded.blocks[0]
            .weight
            .shard()
            .unwrap()
            .spec()
            .local_range(0);
        assert_eq!(own.to_data(), expected.slice_dim(0, rows).to_data());
        Ok(())
    })
    .unwrap();
}
