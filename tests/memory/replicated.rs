//! Memory that a replicated model takes in backward: its gradients, as on one device, and one bucket.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::prelude::*;
use burn_dtensor::replicate::{DataParallel, replicate};

use crate::live::{alone, measure};

const WIDTH: usize = 256;
const BLOCKS: usize = 32;
/// Bytes of a unit: a block.
const UNIT: usize = (WIDTH * WIDTH + WIDTH) * 4;

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Linear>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let block = |_| LinearConfig::new(WIDTH, WIDTH).init(device);
        Self {
            blocks: (0..BLOCKS).map(block).collect(),
        }
    }

    fn loss(&self, device: &Device) -> Tensor<1> {
        let x = Tensor::<2>::ones([1, WIDTH], device);
        unit(self, x, |net, x| {
            let block = |x, block: &Linear| block.forward(x).tanh();
            net.blocks.iter().fold(x, block)
        })
        .sum()
    }
}

/// Bytes that backward takes at most on each of `ranks`, with buckets of `units`.
fn of_backward(ranks: usize, units: usize) -> usize {
    let make = |world: &World, device: &Device| {
        let mesh = DeviceMesh::new(world, [world.size()], ["dp"])?;
        let config = DataParallel::new().with_bucket_bytes(units * UNIT, units * UNIT);
        replicate(Net::new(device), &mesh, config)
    };
    let taken = measure(ranks, false, make, Net::loss);
    taken.peak_backward - taken.after_forward
}

#[test]
fn gradients_take_what_they_do_on_one_device_and_a_bucket() {
    let _alone = alone();
    let plain = measure(1, false, |_, device| Ok(Net::new(device)), Net::loss);
    let plain = plain.peak_backward - plain.after_forward;
    for units in [0, 1, 2, 4] {
        let taken = of_backward(2, units);
        let ratio = taken as f64 / plain as f64;
        println!("buckets of {units} of {BLOCKS} units: {ratio:.3} of one device");
        assert!(ratio <= 1.1, "buckets of {units} units: {ratio}");
    }
}
