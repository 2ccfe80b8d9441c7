//! Frozen parameters and modules.

use burn::module::Module;
use burn::nn::Linear;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_dtensor::fsdp::{ReshardAfterForward, unit};

use super::module_reuse::{Use, trains_as_on_one_device};
use super::net::{Net, compare, config, with_units};
use super::params_outside_unit::{self, bias, sharded, x};

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
        |net| Net {
            blocks: net
                .blocks
                .into_iter()
                .map(|block| block.no_grad())
                .collect(),
            ..net
        },
        config(),
        |net, x, _| {
            unit(net, x, |net, x| {
                let captured = net.first.forward(x);
                unit(&net.blocks[0], (), |block, ()| block.forward(captured))
            })
        },
    );
}

/// A unit that runs several times in a forward, of which some are of a frozen copy, whose input is
/// tracked or not, and a unit that is frozen throughout: PyTorch's
/// `multi_forward_mixed_requires_grad`.
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
    for reshard in [
        ReshardAfterForward::Always,
        ReshardAfterForward::Auto,
        ReshardAfterForward::Never,
    ] {
        compare(
            2,
            freeze,
            config().with_reshard_after_forward(reshard),
            forward,
        );
    }
}

/// A reader that is shallower than its unit's token: of a frozen weight, and of a detached one.
#[test]
fn a_frozen_weight_with_a_captured_shallower_activation() {
    let frozen = |net: params_outside_unit::Net| params_outside_unit::Net {
        blocks: net.blocks.into_iter().map(Module::no_grad).collect(),
        ..net
    };
    type Forward = fn(&Linear, Tensor<2>) -> Tensor<2>;
    let full: Forward = |block, context| block.forward(context);
    let detached: Forward = |block, context| context.matmul(block.weight.val().detach());
    let run = |net: &params_outside_unit::Net, x: Tensor<2>, forward: Forward, alone: bool| {
        let context = net.first.forward(x);
        let deep = context.clone().tanh().tanh().tanh();
        let mut captured = None;
        let both = unit(&net.blocks[0], deep, |block, deep| {
            let shallow = forward(block, context);
            captured = Some(shallow.clone());
            shallow + deep
        });
        // Alone, nothing else of the unit is in that backward, or alive.
        let loss = if alone {
            captured.expect("set in forward")
        } else {
            both
        };
        GradientsParams::from_grads(loss.sum().backward(), net)
    };
    for (prepare, forward) in [
        (
            frozen as fn(params_outside_unit::Net) -> params_outside_unit::Net,
            full,
        ),
        (|net| net, detached),
    ] {
        for alone in [false, true] {
            sharded(
                prepare,
                || params_outside_unit::config().with_ignored(["first.*"]),
                |world, net, plain| {
                    let grads = run(net, x(world), forward, alone);
                    let expected = run(plain, x(world), forward, alone);
                    let weight = |net: &params_outside_unit::Net, grads: &GradientsParams| {
                        grads
                            .get::<2>(net.first.weight.id)
                            .map(Tensor::into_data)
                            .expect("trained")
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
    let frozen = |net: params_outside_unit::Net| params_outside_unit::Net {
        first: Linear {
            weight: net.first.weight.set_require_grad(false),
            ..net.first
        },
        ..net
    };
    sharded(frozen, params_outside_unit::config, |world, net, _| {
        // The root keeps its weights.
        unit(net, x(world).require_grad(), |net, x| {
            assert!(
                !net.first.weight.val().is_tracked(),
                "its layer would save the input for it"
            );
            assert!(bias(&net.first).is_tracked());
            x
        });
        Ok(())
    });
}

#[test]
fn a_partly_frozen_model_trains_as_on_one_device() {
    trains_as_on_one_device(Use::Frozen);
}

#[test]
fn a_model_that_is_frozen_between_steps_trains_as_on_one_device() {
    trains_as_on_one_device(Use::FrozenLater);
}
