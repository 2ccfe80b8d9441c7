//! Where gathered weights lie.

use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::prelude::*;

use crate::live::alone;

const RANKS: usize = 2;
const WIDTH: usize = 256;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self { layers: (0..4).map(|_| LinearConfig::new(WIDTH, WIDTH).init(device)).collect() }
    }

    /// The output, and where each layer's weight was.
    fn forward(&self, x: Tensor<2>) -> (Tensor<2>, Vec<usize>) {
        unit(self, x, |net, mut x| {
            let mut addresses = Vec::new();
            for layer in &net.layers {
                x = unit(layer, x, |layer, x| {
                    addresses.push(address(&layer.weight.val()));
                    layer.forward(x).tanh()
                });
            }
            (x, addresses)
        })
    }
}

/// Of the first element.
fn address(weight: &Tensor<2>) -> usize {
    match weight.clone().inner().into_dispatch().kind {
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => tensor.bytes().as_ptr().addr(),
        other => panic!("on the CPU tensors are of Flex, not {other:?}"),
    }
}

/// What forward and backward gather is in memory that is used from unit to unit and from step to step. Ranks that share a
/// core take each other's.
#[test]
fn gathered_weights_lie_where_they_lay_before() {
    let _alone = alone();
    let shared = std::thread::available_parallelism().map_or(1, usize::from) < RANKS;
    launch(Launch::threads(RANKS), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let mut model = fully_shard(Net::new(&device), &mesh, FullyShard::new().units(["layers.*"]))?;
        let mut optim = AdamWConfig::new().init();
        let mut steps = Vec::new();
        for _ in 0..10 {
            let (output, addresses) = model.forward(Tensor::ones([8, WIDTH], &device));
            let grads = GradientsParams::from_grads(output.sum().backward(), &model);
            model = optim.step(1e-3, model, grads);
            steps.push(addresses);
        }
        assert!(shared || steps[2] == steps[9], "in steps 3 and 10");
        let mut places = steps[2..].concat();
        places.sort();
        places.dedup();
        assert!(places.len() <= if shared { 2 * RANKS } else { 2 }, "{} places for one unit at a time", places.len());
        Ok(())
    })
    .unwrap();
}
