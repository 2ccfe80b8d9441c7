//! What a model may do between its units and inside them.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, Op, Phase, launch};
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, fully_shard, unit};

use super::net::{Forward, Net, WIDTH, compare, config, mesh, net, with_units};
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
    let twice: Forward = |net, x, _| unit(&net.blocks[0], x, |block, x| block.forward(block.forward(x)));
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

/// A unit that runs several times in a forward, of which some are of a frozen copy, whose input is tracked or not, and a unit
/// that is frozen throughout: PyTorch's `multi_forward_mixed_requires_grad`.
#[test]
fn a_unit_that_is_frozen_for_some_of_its_runs_gets_gradients_of_the_others() {
    fn freeze(mut net: Net) -> Net {
        net.blocks[1] = net.blocks[1].clone().no_grad();
        net
    }
    fn forward(net: &Net, x: Tensor<2>, _: usize) -> Tensor<2> {
        let run = |block: &Linear, x| unit(block, x, |block, x| block.forward(x).tanh());
        unit(net, x, |net, x| {
            let mut x = net.first.forward(x);
            for _ in 0..3 {
                x = run(&net.blocks[1], run(&net.blocks[0], x));
                let frozen = net.blocks[0].clone().no_grad();
                x = x.clone() + run(&frozen, x.clone().detach()) + run(&frozen, x);
            }
            x
        })
    }
    for reshard in [ReshardAfterForward::Always, ReshardAfterForward::Auto, ReshardAfterForward::Never] {
        compare(2, freeze, config().with_reshard_after_forward(reshard), forward);
    }
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
        Ok(())
    })
    .unwrap();
}
