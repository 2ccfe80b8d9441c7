//! Concatenation.
//!
//! | | every input | output |
//! |---|---|---|
//! | another dimension | `S(d)` | `S(d)` |
//! | | `P(op)` | `P(op)` |

use burn::tensor::{AsIndex, Shape, Tensor};

use super::args::{dim_of, misfit};
use super::empty::{blank, is_empty};
use super::rows::{PARTIALS, kept, through};
use super::{Rule, Strategy, variadic};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Cat {
    dim: usize,
}

impl Rule for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let mut output = inputs[0].clone();
        let fits = |input: &Shape| (0..output.num_dims()).all(|dim| dim == self.dim || input[dim] == output[dim]);
        if !inputs.iter().all(fits) {
            let why = format!("all lengths but those of dimension {} must be equal", self.dim);
            return Err(misfit(self.name(), inputs, why));
        }
        output[self.dim] = inputs.iter().map(|input| input[self.dim]).sum();
        Ok(vec![output])
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let others = (0..outputs[0].num_dims()).filter(|&dim| dim != self.dim);
        kept(inputs.len(), others).chain(through(inputs.len(), PARTIALS)).collect()
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The tensors one after the other along `dim`, as burn's [`cat`](Tensor::cat).
    #[must_use]
    pub fn cat(mut tensors: Vec<Self>, dim: impl AsIndex) -> Self {
        let dim = dim_of("cat", dim, D);
        if tensors.is_empty() {
            misfit("cat", &[], "there is nothing to concatenate; give at least one tensor").unwind();
        }
        // Burn leaves empty ones out of the graph: here they are left out on every rank.
        if tensors.iter().any(|tensor| tensor.dims()[dim] > 0) {
            tensors.retain(|tensor| tensor.dims()[dim] > 0);
        }
        variadic(&Cat { dim }, tensors, |locals, op| {
            if is_empty(op, 0) { blank(locals, op.output_shape(0)) } else { Tensor::cat(locals, dim) }
        })
    }

    /// The tensors side by side along a new dimension `dim`, as burn's [`stack`](Tensor::stack).
    #[must_use]
    pub fn stack<const D2: usize>(tensors: Vec<Self>, dim: impl AsIndex) -> DTensor<D2, K> {
        let dim = dim_of("stack", dim, D + 1);
        DTensor::cat(tensors.into_iter().map(|tensor| tensor.unsqueeze_dim(dim)).collect(), dim)
    }
}
