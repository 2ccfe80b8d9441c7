//! [`Gradients`]: unsharded gradients of a unit, until they are reduced.

use std::collections::BTreeMap;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Tensor};
use smallvec::SmallVec;

use crate::dtensor::MeshDims;

/// Gradients of unsharded weights, by position.
#[derive(Debug)]
pub(super) struct Gradients {
    /// Gradients that are the same on all tensor-parallel ranks.
    grads: Vec<Option<DispatchTensor>>,
    /// Partial gradients that are expected.
    terms: Vec<SmallVec<[Term; 1]>>,
}

/// This rank's partial value of a gradient that tensor-parallel ranks sum. It exists if the weight was read for
/// computations that differ between these ranks, and then on all of them.
#[derive(Debug, Clone)]
struct Term {
    /// The mesh dimensions along which the ranks differ.
    dims: MeshDims,
    grad: Option<DispatchTensor>,
}

/// Partial gradients with their positions, by the mesh dimensions along which they are summed.
pub(super) type Terms = BTreeMap<MeshDims, Vec<(usize, Option<DispatchTensor>)>>;

impl Gradients {
    /// Creates an empty set of gradients for `n` weights.
    pub(super) fn new(n: usize) -> Self {
        Self { grads: vec![None; n], terms: vec![SmallVec::new(); n] }
    }

    /// Adds `grad` to the gradient at `position`. A weight that checkpointed blocks read has several gradients.
    pub(super) fn add(&mut self, position: usize, grad: DispatchTensor) {
        add_to(&mut self.grads[position], grad);
    }

    pub(super) fn expect_term(&mut self, position: usize, dims: &[usize]) {
        if self.terms[position].iter().all(|term| *term.dims != *dims) {
            self.terms[position].push(Term { dims: dims.into(), grad: None });
        }
    }

    pub(super) fn is_term_expected(&self, position: usize) -> bool {
        !self.terms[position].is_empty()
    }

    pub(super) fn add_term(&mut self, position: usize, dims: &[usize], grad: DispatchTensor) {
        let term = self.terms[position].iter_mut().find(|term| *term.dims == *dims);
        add_to(&mut term.expect("the node of a partial gradient records it as expected").grad, grad);
    }

    #[cfg(feature = "testing")]
    pub(super) fn is_any(&self) -> bool {
        self.grads.iter().chain(self.terms.iter().flatten().map(|term| &term.grad)).any(Option::is_some)
    }

    /// Drops gradients that are entirely zero.
    pub(super) fn drop_zeros(&mut self) {
        for grad in self.grads.iter_mut().chain(self.terms.iter_mut().flatten().map(|term| &mut term.grad)) {
            grad.take_if(|grad| is_zero(grad));
        }
    }

    /// Takes the gradients and the partial gradients, and leaves none.
    pub(super) fn take(&mut self) -> (Vec<Option<DispatchTensor>>, Terms) {
        let Self { grads, terms } = std::mem::replace(self, Self::new(0));
        let mut by_dims = Terms::new();
        for (position, terms) in terms.into_iter().enumerate() {
            for Term { dims, grad } in terms {
                by_dims.entry(dims).or_default().push((position, grad));
            }
        }
        (grads, by_dims)
    }
}

fn add_to(sum: &mut Option<DispatchTensor>, grad: DispatchTensor) {
    *sum = Some(match sum.take() {
        None => grad,
        Some(before) => Dispatch::float_add(before, grad),
    });
}

/// Adds sums of partial gradients to the gradients that are the same on all tensor-parallel ranks.
pub(super) fn add_sums(grads: &mut [Option<DispatchTensor>], positions: &[usize], sums: Vec<Option<DispatchTensor>>) {
    for (&position, sum) in positions.iter().zip(sums) {
        grads[position] = match (grads[position].take(), sum) {
            (Some(grad), Some(sum)) => Some(Dispatch::float_add(grad, sum)),
            (grad, sum) => grad.or(sum),
        };
    }
}

/// Returns a zero gradient for a parameter that did not contribute to the loss.
pub(in super::super) fn zeros_of(shape: &[usize], device: &DispatchDevice, dtype: DType) -> DispatchTensor {
    Dispatch::float_zeros(shape.to_vec().into(), device, dtype.into())
}

/// Returns true if every element is zero. Waits for the device.
pub(in super::super) fn is_zero(grad: &DispatchTensor) -> bool {
    if grad.shape().num_elements() == 0 {
        return true;
    }
    let largest = Dispatch::float_max(Dispatch::float_abs(grad.clone()));
    Tensor::<1>::from_dispatch(largest).into_scalar::<f64>() == 0.0
}
