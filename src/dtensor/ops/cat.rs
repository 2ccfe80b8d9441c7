//! Concatenation.

use burn::tensor::{AsIndex, Tensor};

use super::args::{dim_of, operand_error};
use super::partial_rules::MOVED;
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

const CAT: EinsumRule = EinsumRule::new("cat", ".._..* -> ..D..").with_partial_rules(MOVED);

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Concatenates the tensors along `dim`, as burn's [`cat`](Tensor::cat).
    #[must_use]
    #[track_caller]
    pub fn cat(mut tensors: Vec<Self>, dim: impl AsIndex) -> Self {
        let dim = dim_of("cat", dim, D);
        if tensors.is_empty() {
            operand_error(
                "cat",
                &[],
                "there is nothing to concatenate. Pass at least one tensor",
            )
            .unwind();
        }
        // Burn leaves tensors without elements along `dim` out of the graph. Here every rank leaves
        // them out.
        if tensors.iter().any(|tensor| tensor.dims()[dim] > 0) {
            tensors.retain(|tensor| tensor.dims()[dim] > 0);
        }
        let len = tensors.iter().map(|tensor| tensor.dims()[dim]).sum();
        apply(&CAT.at([dim]).lens([len]), tensors, |locals, _| {
            Tensor::cat(locals, dim)
        })
    }

    /// Stacks the tensors along a new dimension `dim`, as burn's [`stack`](Tensor::stack).
    #[must_use]
    #[track_caller]
    pub fn stack<const D2: usize>(tensors: Vec<Self>, dim: impl AsIndex) -> DTensor<D2, K> {
        let dim = dim_of("stack", dim, D + 1);
        DTensor::cat(
            tensors
                .into_iter()
                .map(|tensor| tensor.unsqueeze_dim(dim))
                .collect(),
            dim,
        )
    }
}
