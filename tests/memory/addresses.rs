//! Where gathered weights lie.

use std::collections::HashSet;

use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::prelude::*;

use crate::live::{alone, apart};

const RANKS: usize = 2;
const WIDTH: usize = 256;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            layers: (0..4)
                .map(|_| LinearConfig::new(WIDTH, WIDTH).init(device))
                .collect(),
        }
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

/// Where the weights of each step were, of ten, on each rank.
fn addresses(options: Launch) -> Vec<Vec<Vec<usize>>> {
    launch(options, |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let mut model = fully_shard(
            Net::new(&device),
            &mesh,
            FullyShard::new().with_units(["layers.*"]),
        )?;
        let mut optim = AdamWConfig::new().init();
        let mut steps = Vec::new();
        for _ in 0..10 {
            let (output, addresses) = model.forward(Tensor::ones([8, WIDTH], &device));
            let grads = GradientsParams::from_grads(output.sum().backward(), &model);
            model = optim.step(1e-3, model, grads);
            steps.push(addresses);
        }
        Ok(steps)
    })
    .unwrap()
    .into_iter()
    .map(|(_, steps)| steps)
    .collect()
}

/// How many places those of the third step and of later ones are.
fn places<'a>(ranks: impl IntoIterator<Item = &'a Vec<Vec<usize>>>) -> usize {
    ranks
        .into_iter()
        .flat_map(|steps| steps[2..].iter().flatten())
        .collect::<HashSet<_>>()
        .len()
}

/// What forward and backward gather is in memory that is used from unit to unit and from step to
/// step. Ranks that share a core take each other's.
#[test]
fn gathered_weights_lie_where_they_lay_before() {
    let _alone = alone();
    let ranks = addresses(apart(RANKS));
    if std::thread::available_parallelism().map_or(1, usize::from) < RANKS {
        let count = places(&ranks);
        assert!(
            count <= 2 * RANKS,
            "{count} places for one unit at a time on each rank"
        );
        return;
    }
    for steps in &ranks {
        assert_eq!(steps[2], steps[9], "in steps 3 and 10");
        let count = places([steps]);
        assert!(count <= 2, "{count} places for one unit at a time");
    }
}

/// Which of the places that ranks have in common is free depends on which of them is ahead; there
/// are no more than if each had its own.
#[test]
fn weights_in_common_lie_where_some_lay_before() {
    let _alone = alone();
    let ranks = addresses(Launch::threads(RANKS));
    let count = places(&ranks);
    assert!(count <= 2 * RANKS, "{count} places for one unit at a time");
}
