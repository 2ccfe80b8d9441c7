//! Operators and a layer that burn-dtensor does not have, written with what it makes public.

use burn::module::{Module, Param};
use burn::tensor::{Tensor, activation};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::partials::NOTHING;
use burn_dtensor::dtensor::ops::{Axes, apply, module};
use burn_dtensor::nn::styled;

/// `x * sigmoid(1.702 x)`, on whatever a trait says is a tensor here.
pub trait QuickGelu {
    fn quick_gelu(self) -> Self;
}

impl<const D: usize> QuickGelu for Tensor<D> {
    fn quick_gelu(self) -> Self {
        self.clone() * activation::sigmoid(self * 1.702)
    }
}

impl<const D: usize> QuickGelu for DTensor<D> {
    fn quick_gelu(self) -> Self {
        apply(&Axes::pointwise("quick_gelu", NOTHING), self, |x, _| x.quick_gelu())
    }
}

/// The sums of each row of a matrix, and of its squares: `[rows, columns] -> [rows, 1], [rows, 1]`.
pub trait Moments: Sized {
    fn moments(self) -> (Self, Self);
}

impl Moments for Tensor<2> {
    fn moments(self) -> (Self, Self) {
        (self.clone().sum_dim(1), self.square().sum_dim(1))
    }
}

impl Moments for DTensor<2> {
    fn moments(self) -> (Self, Self) {
        const MOMENTS: Axes = Axes::new("moments", "rc -> r1, r1");
        apply(&MOMENTS, self, |x, _| x.moments())
    }
}

/// `x @ weightᵀ`, of a weight `[d_out, d_in]`, as PyTorch stores it.
#[derive(Module, Debug)]
pub struct Projection {
    pub weight: Param<Tensor<2>>,
}

impl Projection {
    /// Of `[batch, d_in]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.matmul(self.weight.val().transpose())
    }

    /// [`forward`](Self::forward), brought where the weight's style says.
    pub fn forward_dtensor(&self, x: DTensor<2>) -> DTensor<2> {
        styled(&self.weight, x, |x, weight| module::linear(x, weight.transpose(), None))
    }
}
