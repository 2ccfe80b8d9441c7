//! [`Grads`]: containers of gradients in which a parameter's gradient is looked up.

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor};

/// Gradients of a model's parameters: burn's [`Gradients`], which `backward` returns, or
/// [`GradientsParams`], which optimizers take.
pub trait Grads: sealed::Sealed {}

impl<T: sealed::Sealed> Grads for T {}

mod sealed {
    use super::{Param, Tensor};

    pub trait Sealed {
        /// Returns the gradient of the parameter's base; `None` if it has none.
        fn of<const D: usize>(&self, param: &Param<Tensor<D>>) -> Option<Tensor<D>>;
    }
}

impl sealed::Sealed for Gradients {
    fn of<const D: usize>(&self, param: &Param<Tensor<D>>) -> Option<Tensor<D>> {
        param.base().grad(self)
    }
}

impl sealed::Sealed for GradientsParams {
    fn of<const D: usize>(&self, param: &Param<Tensor<D>>) -> Option<Tensor<D>> {
        self.get(param.id)
    }
}
