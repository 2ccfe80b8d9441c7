//! Small models in PyTorch's layout: parameter paths and shapes equal those of the goldens.

mod gpt;
mod mlp;
mod parallel;

pub use gpt::{Block, Gpt, GptSize};
pub use mlp::Mlp;
pub use parallel::plan;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};

/// A named source of initial values.
pub trait Init {
    /// The values of the parameter at `path`.
    fn data(&self, path: &str) -> TensorData;

    /// A parameter holding them.
    fn param<const D: usize>(&self, path: String, device: &Device) -> Param<Tensor<D>> {
        Param::from_data(self.data(&path), device)
    }
}

/// `x W^T + b` with `weight` of shape `[out, in]`.
#[derive(Module, Debug)]
pub struct Affine {
    pub weight: Param<Tensor<2>>,
    pub bias: Option<Param<Tensor<1>>>,
}

impl Affine {
    pub fn new(init: &impl Init, path: &str, bias: bool, device: &Device) -> Self {
        Self {
            weight: init.param(format!("{path}.weight"), device),
            bias: bias.then(|| init.param(format!("{path}.bias"), device)),
        }
    }

    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let bias = self.bias.as_ref().map(|bias| bias.val());
        burn::tensor::module::linear(x, self.weight.val().transpose(), bias)
    }
}

/// LayerNorm with PyTorch's names.
#[derive(Module, Debug)]
pub struct Norm {
    pub weight: Param<Tensor<1>>,
    pub bias: Param<Tensor<1>>,
}

impl Norm {
    pub fn new(init: &impl Init, path: &str, device: &Device) -> Self {
        Self {
            weight: init.param(format!("{path}.weight"), device),
            bias: init.param(format!("{path}.bias"), device),
        }
    }

    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let (var, mean) = x.clone().var_mean_bias(D - 1);
        let x = (x - mean) / (var + 1e-5).sqrt();
        x * self.weight.val().unsqueeze() + self.bias.val().unsqueeze()
    }
}

/// A lookup table.
#[derive(Module, Debug)]
pub struct Table {
    pub weight: Param<Tensor<2>>,
}

impl Table {
    pub fn new(init: &impl Init, path: &str, device: &Device) -> Self {
        Self {
            weight: init.param(format!("{path}.weight"), device),
        }
    }
}
