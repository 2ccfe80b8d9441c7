//! Products of vectors.
//!
//! | cross product | other dimensions | linear | linear |
//! |---|---|---|---|
//! | `a`, `b` | `S(d)`, `S(d)` | `P(sum)`, `R`; `P(avg)`, `R` | `R`, `P(sum)`; `R`, `P(avg)` |
//! | output | `S(d)` | `P(sum)`; `P(avg)` | `P(sum)`; `P(avg)` |

use burn::tensor::{AsIndex, Shape, kind};

use super::args::{dim_of, misfit};
use super::placements::{AVG, R, SUM};
use super::rows::kept;
use super::{Rule, Strategy, binary, strategy};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Cross {
    dim: usize,
}

impl Rule for Cross {
    fn name(&self) -> &'static str {
        "cross"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        if inputs[0] != inputs[1] || inputs[0][self.dim] != 3 {
            let why = format!("vectors along dimension {} must have 3 elements, and both inputs one shape", self.dim);
            return Err(misfit(self.name(), inputs, why));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let linear = [[SUM, R, SUM], [R, SUM, SUM], [AVG, R, AVG], [R, AVG, AVG]];
        let others = (0..inputs[0].num_dims()).filter(|&dim| dim != self.dim);
        kept(2, others).chain(linear.map(|[a, b, output]| strategy([a, b], [output]))).collect()
    }
}

impl<const D: usize> DTensor<D> {
    /// The cross product of vectors along `dim`, as burn's [`cross`](burn::tensor::Tensor::cross).
    #[must_use]
    pub fn cross<Dim: AsIndex>(self, other: Self, dim: Dim) -> Self {
        let dim = dim_of("cross", dim, D);
        binary(&Cross { dim }, self, other, |a, b, op| {
            // burn-flex 0.22 cannot take vectors of which there are none.
            if op.output_shape(0).num_elements() == 0 { a * b } else { a.cross(b, dim) }
        })
    }
}

impl<K: Kind + kind::Numeric> DTensor<1, K> {
    /// The dot product of two vectors, as burn's [`dot`](burn::tensor::Tensor::dot).
    #[must_use]
    pub fn dot(self, other: Self) -> Self {
        self.mul(other).sum()
    }
}
