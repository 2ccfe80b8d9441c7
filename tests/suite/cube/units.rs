//! A sharded model's units.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::prelude::*;

use super::{run, wgpu};

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
                    OpenedBy::Other if at == 0 => unit(block, x, |block, x| block.forward(x).tanh()),
                    // The graph saves views of weights: of a batch.
                    OpenedBy::Other | OpenedBy::Read => block.forward::<3>(x.unsqueeze()).tanh().squeeze_dim(0),
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

/// The gradients of this rank's shards, by value, and what was launched for how many collectives of units.
fn step(
    ranks: usize,
    device: &Device,
    reshard: ReshardAfterForward,
    opened: OpenedBy,
) -> Vec<(Vec<Vec<f32>>, u64, u64)> {
    run(ranks, device, |world| {
        let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
        let device = world.device().clone().autodiff();
        let values = |count: usize| (0..count).map(|i| ((i * 37 % 23) as f32 - 11.0) / 23.0).collect::<Vec<_>>();
        let linear = |inputs: usize, outputs: usize| {
            let weight = TensorData::new(values(inputs * outputs), [inputs, outputs]);
            let bias = TensorData::new(values(outputs), [outputs]);
            Linear { weight: Param::from_data(weight, &device), bias: Some(Param::from_data(bias, &device)) }
        };
        let net = Net { blocks: vec![linear(7, 7), linear(7, 7)], head: linear(7, 3) };
        let config = match opened {
            OpenedBy::Other => FullyShard::new().unit_of(["blocks.0", "blocks.1"]),
            _ => FullyShard::new().units(["blocks.*"]),
        };
        let net = fully_shard(net, &mesh, config.reshard_after_forward(reshard))?;
        // Ranks have told each other whether one is lazy.
        world.ledger().reset();
        let x = Tensor::from_data(TensorData::new(values(14), [2, 7]), &device);
        let grads = net.forward(x, opened).square().sum().backward();
        let floats = |data: TensorData| data.iter::<f32>().collect::<Vec<_>>();
        let of_layer = |linear: &Linear| {
            let weight = linear.weight.base().grad(&grads).expect("a gradient");
            let bias = linear.bias.as_ref().expect("a bias").base().grad(&grads).expect("a gradient");
            [floats(weight.into_data()), floats(bias.into_data())].concat()
        };
        let gradients = net.blocks.iter().chain([&net.head]).map(of_layer).collect();
        let ledger = world.ledger();
        // What backward gathers was issued ahead, and is read where it is.
        let ahead = ledger.calls_in(Op::AllGather, Phase::Backward);
        let collectives = ledger.calls(Op::AllGather) + ledger.calls(Op::ReduceScatter);
        Ok((gradients, ledger.copied().launches + ahead, collectives))
    })
}

fn are_close(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{found} {expected}");
    }
}

#[test]
fn a_units_collectives_are_two_kernels_each_and_gradients_those_of_flex() {
    for ranks in [2, 3] {
        let step = |device| step(ranks, device, ReshardAfterForward::Auto, OpenedBy::Program);
        for ((found, launches, collectives), (expected, none, _)) in step(&wgpu()).iter().zip(&step(&Device::flex())) {
            assert!(*collectives >= 6, "each of three units is gathered and reduced");
            assert!(*none <= 2, "Flex launches nothing");
            assert_eq!(*launches, 2 * collectives);
            are_close(found, expected);
        }
    }
}

#[test]
fn gradients_are_those_of_flex_where_a_few_ranks_keep_what_forward_gathered() {
    let step = |device| step(4, device, ReshardAfterForward::Ranks(2), OpenedBy::Program);
    step(&wgpu())
        .iter()
        .zip(&step(&Device::flex()))
        .for_each(|((found, ..), (expected, ..))| are_close(found, expected));
}

/// Backward comes to the views of weights that the graph has saved before it comes to the unit.
#[test]
fn gradients_are_those_of_flex_where_the_program_does_not_open_units() {
    for opened in [OpenedBy::Read, OpenedBy::Other] {
        let step = |device| step(2, device, ReshardAfterForward::Always, opened);
        let both = step(&wgpu()).into_iter().zip(step(&Device::flex()));
        both.for_each(|((found, ..), (expected, ..))| are_close(&found, &expected));
    }
}
