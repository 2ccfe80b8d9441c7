//! Linear layers with tanh between.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_dtensor::fsdp::unit;

use super::{Affine, Init};

#[derive(Module, Debug)]
pub struct Mlp {
    pub layers: Vec<Affine>,
}

impl Mlp {
    pub fn new(init: &impl Init, layers: usize, device: &Device) -> Self {
        let layer = |i| Affine::new(init, &format!("layers.{i}"), true, device);
        Self {
            layers: (0..layers).map(layer).collect(),
        }
    }

    /// `[batch, in]` to `[batch, out]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, |mlp, mut x| {
            for (i, layer) in mlp.layers.iter().enumerate() {
                x = unit(layer, x, |layer, x| layer.forward(x));
                if i + 1 < mlp.layers.len() {
                    x = x.tanh();
                }
            }
            x
        })
    }

    /// Mean squared error.
    pub fn loss(&self, x: Tensor<2>, y: Tensor<2>) -> Tensor<1> {
        let error = self.forward(x) - y;
        (error.clone() * error).mean()
    }
}
