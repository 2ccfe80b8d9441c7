//! What a model may do between its units and inside them.

use burn::module::Module;
use burn::tensor::Device;
use burn_dtensor::comm::{Launch, Op, Phase, launch};
use burn_dtensor::fsdp::{FullyShard, fully_shard, unit};

use super::net::{Forward, WIDTH, compare, config, mesh, net, with_units};
use super::support::{on_device, tensor};

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
fn several_inputs_and_outputs() {
    compare(
        2,
        |net| net,
        config(),
        |net, x, _| {
            unit(net, x, |net, x| {
                let a = net.first.forward(x.clone());
                // Gradients go through both.
                let b = a.clone() * 2.0;
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
fn an_output_that_nothing_reads_changes_nothing() {
    compare(
        2,
        |net| net,
        config(),
        |net, x, _| {
            unit(net, x, |net, x| {
                let x = net.first.forward(x);
                let (read, _) = unit(&net.blocks[0], x, |block, x| {
                    let y = block.forward(x);
                    (y.clone().tanh(), y * 2.0)
                });
                unit(&net.blocks[1], read, |block, x| block.forward(x))
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
    let twice: Forward = |net, x, _| {
        unit(&net.blocks[0], x, |block, x| {
            block.forward(block.forward(x))
        })
    };
    compare(2, |net| net, config(), twice);
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let sharded = fully_shard(on_device(&model, &device), &mesh(world)?, config())?;
        let gathers = |phase| world.ledger().calls_in(Op::AllGather, phase);
        world.ledger().reset();
        let loss = twice(&sharded, tensor(1, [4, WIDTH], &device), 0).sum();
        assert_eq!((gathers(Phase::Forward), gathers(Phase::Backward)), (1, 0));
        let _ = loss.backward();
        assert_eq!((gathers(Phase::Forward), gathers(Phase::Backward)), (1, 1));
        assert_eq!(world.ledger().calls(Op::AllGather), 2);
        assert_eq!(world.ledger().calls(Op::ReduceScatter), 1);
        Ok(())
    })
    .unwrap();
}

#[test]
fn inference_without_autodiff() {
    let model = net(&Device::flex());
    launch(Launch::threads(3), |world| {
        let device = world.device().clone();
        let expected = with_units(&model, tensor(1, [4, WIDTH], &device), 0);
        let sharded = fully_shard(
            on_device(&model, &device.clone().autodiff()),
            &mesh(world)?,
            config(),
        )?;
        let output = with_units(&sharded.valid(), tensor(1, [4, WIDTH], &device), 0);
        assert_eq!(output.into_data(), expected.clone().into_data());
        let plain = fully_shard(on_device(&model, &device), &mesh(world)?, config())?;
        let output = with_units(&plain, tensor(1, [4, WIDTH], &device), 0);
        assert_eq!(output.into_data(), expected.into_data());
        Ok(())
    })
    .unwrap();
}
