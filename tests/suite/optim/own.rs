//! An optimizer of one's own that looks at rows.

use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor};

/// Steps by the gradient over the largest of each row so far.
#[derive(Clone)]
pub struct RowScaled;

/// Of a matrix `[rows, 1]`.
#[derive(Clone)]
pub struct Largest<const D: usize>(Tensor<D>);

impl Optimizer for RowScaled {
    type State<const D: usize> = Largest<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Largest<D>>,
    ) -> (Tensor<D>, Option<Largest<D>>) {
        let now = grad.clone().abs().max_dim(D - 1);
        let largest = match state {
            Some(Largest(before)) => before.max_pair(now),
            None => now,
        };
        (tensor - grad / largest.clone() * lr, Some(Largest(largest)))
    }

    fn to_device<const D: usize>(state: Largest<D>, device: &Device) -> Largest<D> {
        Largest(state.0.to_device(device))
    }
}

impl<const D: usize> RecordState for Largest<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "largest", self.0.clone().into_data());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        Some(Self(Tensor::from_data(
            src.take_tensor(prefix, "largest")?,
            device,
        )))
    }
}
