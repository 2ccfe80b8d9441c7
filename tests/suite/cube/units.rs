//! A sharded model's units.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::gpu;

use super::{rounding, run};

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Linear>,
    head: Linear,
}

impl Net {
    fn forward(&self, x: Tensor<2>, opened: OpenedBy) -> Tensor<2> {
        unit(self, x, |net, mut x| {
            for (at, block) in net.blocks.iter().enumerate() {
                x = match opened {
                    OpenedBy::Program => unit(block, x, |block, x| block.forward(x).tanh()),
                    OpenedBy::Other if at == 0 => {
                        unit(block, x, |block, x| block.forward(x).tanh())
                    }
                    // The graph saves views of weights: of a batch.
                    OpenedBy::Other | OpenedBy::Read => {
                        block.forward::<3>(x.unsqueeze()).tanh().squeeze_dim(0)
                    }
                };
            }
            net.head.forward(x)
        })
    }
}

/// Who opens the units of blocks.
#[derive(Debug, Clone, Copy)]
enum OpenedBy {
    Program,
    Read,
    /// The program opens the first block's, which is the second's, too.
    Other,
}

/// The gradients of this rank's shards, by value, and what was launched for how many collectives of
/// units.
fn step(
    ranks: usize,
    device: &Device,
    reshard: ReshardAfterForward,
    opened: OpenedBy,
) -> Vec<(Vec<Vec<f32>>, u64, u64)> {
    run(ranks, device, |world| {
        let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
        let device = world.device().clone().autodiff();
        let values = |count: usize| {
            (0..count)
                .map(|i| ((i * 37 % 23) as f32 - 11.0) / 23.0)
                .collect::<Vec<_>>()
        };
        let linear = |inputs: usize, outputs: usize| {
            let weight = TensorData::new(values(inputs * outputs), [inputs, outputs]);
            let bias = TensorData::new(values(outputs), [outputs]);
            Linear {
                weight: Param::from_data(weight, &device),
                bias: Some(Param::from_data(bias, &device)),
            }
        };
        let net = Net {
            blocks: vec![linear(7, 7), linear(7, 7)],
            head: linear(7, 3),
        };
        let config = match opened {
            OpenedBy::Other => FullyShard::new().with_group_unit(["blocks.0", "blocks.1"]),
            _ => FullyShard::new().with_units(["blocks.*"]),
        };
        let net = fully_shard(net, &mesh, config.with_reshard_after_forward(reshard))?;
        // Ranks have told each other whether one is lazy.
        world.ledger().reset();
        let x = Tensor::from_data(TensorData::new(values(14), [2, 7]), &device);
        let grads = net.forward(x, opened).square().sum().backward();
        let floats = |data: TensorData| data.iter::<f32>().collect::<Vec<_>>();
        let of_layer = |linear: &Linear| {
            let weight = linear.weight.base().grad(&grads).expect("a gradient");
            let bias = linear
                .bias
                .as_ref()
                .expect("a bias")
                .base()
                .grad(&grads)
                .expect("a gradient");
            [floats(weight.into_data()), floats(bias.into_data())].concat()
        };
        let gradients = net.blocks.iter().chain([&net.head]).map(of_layer).collect();
        let ledger = world.ledger();
        // What backward gathers was issued ahead, and is read where it is.
        let deferred = ledger.calls_in(Op::AllGather, Phase::Backward);
        let collectives = ledger.calls(Op::AllGather) + ledger.calls(Op::ReduceScatter);
        Ok((gradients, ledger.copied().launches + deferred, collectives))
    })
}

/// A layer with a block inside.
#[derive(Module, Debug)]
struct Around {
    outer: Linear,
    inner: Block,
}

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
}

#[derive(Module, Debug)]
struct WithAside {
    stem: Linear,
    aside: Around,
    head: Linear,
}

impl WithAside {
    /// Nobody hears of what `aside` computes.
    fn forward(&self, x: Tensor<2>, is_checkpointed: bool) -> Tensor<2> {
        unit(self, x, |net, x| {
            let x = unit(&net.stem, x, |stem, x| stem.forward(x));
            unit(&net.aside, x.clone(), |aside, x| {
                // The graph saves a view of the weight.
                let x = aside.outer.forward::<3>(x.unsqueeze());
                let block =
                    |block: &Block, x| unit(&block.linear, x, |linear, x| linear.forward(x));
                if is_checkpointed {
                    checkpoint_activations(&aside.inner, x, block)
                } else {
                    block(&aside.inner, x)
                }
            });
            net.head.forward(x)
        })
    }
}

/// The gradients of this rank's shards of weights.
fn step_with_unused_output(
    device: &Device,
    frozen: bool,
    is_checkpointed: bool,
) -> Vec<Vec<Vec<f32>>> {
    run(2, device, |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let device = world.device().clone().autodiff();
        let values = |count: usize| {
            (0..count)
                .map(|i| ((i * 37 % 23) as f32 - 11.0) / 23.0)
                .collect::<Vec<_>>()
        };
        let linear = |inputs: usize, outputs: usize| {
            let weight = TensorData::new(values(inputs * outputs), [inputs, outputs]);
            Linear {
                weight: Param::from_data(weight, &device),
                bias: None,
            }
        };
        let outer = linear(7, 7);
        let outer = if frozen { outer.no_grad() } else { outer };
        let net = WithAside {
            stem: linear(7, 7),
            aside: Around {
                outer,
                inner: Block {
                    linear: linear(7, 5),
                },
            },
            head: linear(7, 3),
        };
        let units = FullyShard::new().with_units(["stem", "aside", "aside.inner.linear"]);
        let net = fully_shard(
            net,
            &mesh,
            units.with_reshard_after_forward(ReshardAfterForward::Always),
        )?;
        let x = Tensor::from_data(TensorData::new(values(14), [2, 7]), &device);
        let grads = net.forward(x, is_checkpointed).square().sum().backward();
        let of_layer = |linear: &Linear| {
            let grad = linear.weight.base().grad(&grads);
            grad.map_or_else(Vec::new, |grad| grad.into_data().iter::<f32>().collect())
        };
        Ok([
            &net.stem,
            &net.aside.outer,
            &net.aside.inner.linear,
            &net.head,
        ]
        .map(of_layer)
        .to_vec())
    })
}

fn are_close(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!(
            (found - expected).abs() <= rounding(1e-5) * expected.abs().max(1.0),
            "{found} {expected}"
        );
    }
}

#[test]
fn a_units_collectives_are_two_kernels_each_and_gradients_those_of_flex() {
    for ranks in [2, 3] {
        let step = |device| step(ranks, device, ReshardAfterForward::Auto, OpenedBy::Program);
        for ((found, launches, collectives), (expected, none, _)) in
            step(&gpu()).iter().zip(&step(&Device::flex()))
        {
            assert!(
                *collectives >= 6,
                "each of three units is gathered and reduced"
            );
            assert!(*none <= 2, "Flex launches nothing");
            assert_eq!(*launches, 2 * collectives);
            are_close(found, expected);
        }
    }
}

#[test]
fn gradients_are_those_of_flex_where_a_few_ranks_keep_what_forward_gathered() {
    let step = |device| step(4, device, ReshardAfterForward::Ranks(2), OpenedBy::Program);
    step(&gpu())
        .iter()
        .zip(&step(&Device::flex()))
        .for_each(|((found, ..), (expected, ..))| are_close(found, expected));
}

/// Backward comes to the views of weights that the graph has saved before it comes to the unit.
#[test]
fn gradients_are_those_of_flex_where_the_program_does_not_open_units() {
    for opened in [OpenedBy::Read, OpenedBy::Other] {
        let step = |device| step(2, device, ReshardAfterForward::Always, opened);
        let both = step(&gpu()).into_iter().zip(step(&Device::flex()));
        both.for_each(|((found, ..), (expected, ..))| are_close(&found, &expected));
    }
}

/// Zeros come through the views that the graph has saved of a weight whose unit backward does not
/// come to.
#[test]
fn gradients_are_those_of_flex_where_no_loss_hears_of_a_unit_around_another() {
    for (frozen, is_checkpointed) in itertools::iproduct!([true, false], [false, true]) {
        let step = |device| step_with_unused_output(device, frozen, is_checkpointed);
        for (found, expected) in step(&gpu()).iter().zip(&step(&Device::flex())) {
            let has_gradient = expected.iter().map(|grad| !grad.is_empty());
            assert!(
                has_gradient.eq([true, false, false, true]),
                "zeros of unheard weights are none"
            );
            are_close(found, expected);
        }
    }
}
