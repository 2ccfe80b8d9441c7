//! [`Gradients`]: whole gradients of a unit, until they are reduced.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;

/// Gradients of whole weights, by position.
#[derive(Debug)]
pub(super) struct Gradients {
    /// Those that are the same on all tensor-parallel ranks.
    grads: Vec<Option<DispatchTensor>>,
    terms: Vec<Term>,
}

/// This rank's term of a gradient that the tensor-parallel ranks add up.
#[derive(Debug, Clone, Default)]
struct Term {
    /// Whether the weight was read for computations that differ between tensor-parallel ranks: on
    /// one of them and so on all.
    expected: bool,
    grad: Option<DispatchTensor>,
}

impl Gradients {
    /// Of `n` weights.
    pub(super) fn new(n: usize) -> Self {
        Self { grads: vec![None; n], terms: vec![Term::default(); n] }
    }

    pub(super) fn add(&mut self, position: usize, grad: DispatchTensor) {
        self.grads[position] = Some(grad);
    }

    pub(super) fn expect_term(&mut self, position: usize) {
        self.terms[position].expected = true;
    }

    pub(super) fn is_term_expected(&self, position: usize) -> bool {
        self.terms[position].expected
    }

    pub(super) fn add_term(&mut self, position: usize, grad: DispatchTensor) {
        self.terms[position].grad = Some(grad);
    }

    #[cfg(feature = "testing")]
    pub(super) fn is_any(&self) -> bool {
        self.grads.iter().chain(self.terms.iter().map(|term| &term.grad)).any(Option::is_some)
    }

    /// Drops those that are zero everywhere.
    pub(super) fn drop_zeros(&mut self) {
        for grad in self.grads.iter_mut().chain(self.terms.iter_mut().map(|term| &mut term.grad)) {
            grad.take_if(|grad| is_zero(grad));
        }
    }

    /// The gradients, and the terms that are expected, each with its position.
    #[expect(clippy::type_complexity, reason = "two lists")]
    pub(super) fn take(&mut self) -> (Vec<Option<DispatchTensor>>, Vec<(usize, Option<DispatchTensor>)>) {
        let Self { grads, terms } = std::mem::replace(self, Self::new(0));
        let expected = terms.into_iter().enumerate().filter(|(_, term)| term.expected);
        (grads, expected.map(|(position, term)| (position, term.grad)).collect())
    }
}

/// Adds sums of terms to the gradients that are the same on all tensor-parallel ranks.
pub(super) fn add_sums(grads: &mut [Option<DispatchTensor>], positions: &[usize], sums: Vec<Option<DispatchTensor>>) {
    for (&position, sum) in positions.iter().zip(sums) {
        grads[position] = match (grads[position].take(), sum) {
            (Some(grad), Some(sum)) => Some(Dispatch::float_add(grad, sum)),
            (grad, sum) => grad.or(sum),
        };
    }
}

/// Whether every element is zero. Waits for the device.
fn is_zero(grad: &DispatchTensor) -> bool {
    if grad.shape().num_elements() == 0 {
        return true;
    }
    let largest = Dispatch::float_max(Dispatch::float_abs(grad.clone()));
    Tensor::<1>::from_dispatch(largest).into_scalar::<f64>() == 0.0
}
