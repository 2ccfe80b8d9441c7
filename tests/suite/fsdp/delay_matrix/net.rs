//! The model of the matrix: three units and a root, of odd shapes.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::fsdp::unit;

use crate::fsdp::support::{tensor, values};

/// Features of the blocks. A weight has a row for each that it takes: no number of ranks shares
/// them all evenly, and of four ranks one has nothing of the last block, of eight five.
const WIDTHS: [usize; 4] = [5, 7, 3, 4];

/// Rows of a rank's batch.
const ROWS: usize = 4;

/// Its layers cast their inputs for themselves where no unit does it.
#[derive(Module, Debug)]
pub struct Net {
    pub blocks: Vec<Linear>,
    /// Every rank holds it whole.
    pub gain: Param<Tensor<1>>,
    head: Linear,
}

impl Net {
    pub fn new() -> Self {
        let device = Device::flex();
        device.seed(5);
        let linear = |widths: &[usize]| LinearConfig::new(widths[0], widths[1]).init(&device);
        let net = Self {
            blocks: WIDTHS.windows(2).map(linear).collect(),
            gain: Param::from_tensor(tensor::<1>(7, [WIDTHS[3]], &device) + 1.0),
            head: linear(&[WIDTHS[3], 1]),
        };
        // Drawn here, on one thread.
        let _ = values(&net, None);
        net
    }

    /// The loss of one rank's batch; `inside` each unit, something else may happen.
    pub fn loss(&self, step: u64, rank: usize, device: &Device, inside: impl Fn()) -> Tensor<1> {
        let x = tensor(100 * (step + 1) + rank as u64, [ROWS, WIDTHS[0]], device);
        let y = unit(self, x, |net, x| {
            let block = |x, block: &Linear| {
                unit(block, x, |block, x| {
                    inside();
                    linear(block, x).tanh()
                })
            };
            let x = net.blocks.iter().fold(x, block);
            inside();
            linear(&net.head, x * net.gain.val().unsqueeze())
        });
        (y.cast(DType::F32) - 0.3).square().mean()
    }
}

fn linear(layer: &Linear, x: Tensor<2>) -> Tensor<2> {
    layer.forward(x.cast(layer.weight.val().dtype()))
}
