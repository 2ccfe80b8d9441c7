//! Elements in another order along some dimensions: flips and rolls.
//!
//! | | input | output |
//! |---|---|---|
//! | another dimension | `S(d)` | `S(d)` |
//! | | `P(op)` | `P(op)` |

use burn::tensor::{AsIndex, Shape, Tensor};
use smallvec::SmallVec;

use super::args::{dim_of, misfit};
use super::empty::is_empty;
use super::rows::{PARTIALS, kept, through};
use super::{Rule, Strategy, unary};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Reorder {
    name: &'static str,
    dims: SmallVec<[usize; 4]>,
}

impl Rule for Reorder {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        Ok(inputs.to_vec())
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let others = (0..inputs[0].num_dims()).filter(|dim| !self.dims.contains(dim));
        kept(1, others).chain(through(1, PARTIALS)).collect()
    }
}

fn reorder<const D: usize, K: Kind>(
    name: &'static str,
    x: DTensor<D, K>,
    dims: impl IntoIterator<Item = usize>,
    local: impl FnOnce(Tensor<D, K>) -> Tensor<D, K>,
) -> DTensor<D, K> {
    let rule = Reorder { name, dims: dims.into_iter().collect() };
    unary(&rule, x, |x, op| if is_empty(op, 0) { x } else { local(x) })
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The elements in reverse along `axes`, as burn's [`flip`](Tensor::flip).
    #[must_use]
    pub fn flip<const N: usize>(self, axes: [impl AsIndex; N]) -> Self {
        let axes = axes.map(|axis| dim_of("flip", axis, D));
        reorder("flip", self, axes, |x| x.flip(axes))
    }

    /// The elements moved by `shift` along `dim`, around the end, as burn's
    /// [`roll_dim`](Tensor::roll_dim).
    #[must_use]
    pub fn roll_dim<Shift: AsIndex, Dim: AsIndex>(self, shift: Shift, dim: Dim) -> Self {
        let dim = dim_of("roll_dim", dim, D);
        reorder("roll_dim", self, [dim], |x| x.roll_dim(shift, dim))
    }

    /// The elements moved by `shifts` along `dims`, around the end, as burn's [`roll`](Tensor::roll).
    #[must_use]
    pub fn roll<Shift: AsIndex, Dim: AsIndex>(self, shifts: &[Shift], dims: &[Dim]) -> Self {
        if shifts.len() != dims.len() {
            let why = format!("{} shifts for {} dimensions; give as many", shifts.len(), dims.len());
            misfit("roll", &[self.shape()], why).unwind();
        }
        let dims: SmallVec<[usize; 4]> = dims.iter().map(|&dim| dim_of("roll", dim, D)).collect();
        reorder("roll", self, dims.iter().copied(), |x| x.roll(shifts, &dims))
    }
}
