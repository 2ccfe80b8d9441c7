//! Blocks over DTensors, tensor-parallel and sharded: collectives in them are made again.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Device;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::super::support::on_device;
use super::{batch, full_grads, linear};

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        Self {
            up: linear(1, device),
            down: linear(3, device),
        }
    }

    fn forward(&self, x: DTensor<2>, again: bool) -> DTensor<2> {
        let compute = |mlp: &Self, x: DTensor<2>| {
            mlp.down
                .forward_dtensor(activation::tanh(mlp.up.forward_dtensor(x)))
        };
        match again {
            true => checkpoint_activations(self, x, compute),
            false => unit(self, x, compute),
        }
    }
}

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Mlp>,
}

#[test]
fn column_and_row_parallel_layers_compute_again() {
    let plan = || {
        Plan::new()
            .with_style("blocks.*.up", Style::colwise())
            .with_style("blocks.*.down", Style::rowwise())
    };
    for (shape, names) in [
        (vec![2], vec!["tp"]),
        (vec![3], vec!["tp"]),
        (vec![2, 2], vec!["shard", "tp"]),
    ] {
        MeshTest::new(shape, names).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let net = Net {
                blocks: vec![Mlp::new(&Device::flex()), Mlp::new(&Device::flex())],
            };
            let tp = mesh.slice("tp")?;
            let mut net = parallelize(on_device(&net, &device), &tp, plan())?;
            if mesh.ndim() > 1 {
                net = fully_shard(
                    net,
                    &mesh.slice("shard")?,
                    FullyShard::new().with_units(["blocks.*"]),
                )?;
            }
            let row = mesh.rank() as u64 / tp.size() as u64;
            let grads = |again| {
                let x = DTensor::distribute_replicated(
                    batch(row, &device),
                    &tp,
                    &[Placement::Replicate],
                )?;
                let y = unit(&net, x, |net, x| {
                    net.blocks
                        .iter()
                        .fold(x, |x, block| block.forward(x, again))
                });
                full_grads(&net, y.full_tensor()?.square().sum())
            };
            let kept = grads(false)?;
            assert!(kept.values().flatten().any(|grad| *grad != 0.0));
            assert_eq!(grads(true)?, kept, "{mesh}");
            Ok(())
        });
    }
}
