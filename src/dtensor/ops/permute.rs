//! Permutations of dimensions.
//!
//! | input | output |
//! |---|---|
//! | `S(axes[d])` | `S(d)` |
//! | `P(op)` | `P(op)` |

use std::array::from_fn;

use burn::tensor::{AsIndex, MovedimArgs, Shape};

use super::args::{converted, dim_of, operand_error};
use super::partial_rules::MOVED;
use super::placements::S;
use super::{ShardingRule, Strategy, apply, strategy};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

/// Permutation in which dimension `d` of the output is dimension `axes[d]` of the input.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Permute<const D: usize> {
    axes: [usize; D],
}

impl<const D: usize> ShardingRule for Permute<D> {
    fn name(&self) -> &'static str {
        "permute"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        if (0..D).any(|dim| !self.axes.contains(&dim)) {
            let why = format!("the axes {:?} must contain every dimension once", self.axes);
            return Err(operand_error(self.name(), inputs, why));
        }
        Ok(vec![self.axes.map(|axis| inputs[0][axis]).into()])
    }

    fn supports_empty_shards(&self) -> bool {
        true
    }

    fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let sharded = self
            .axes
            .iter()
            .enumerate()
            .map(|(dim, &axis)| strategy([S(axis)], [S(dim)]));
        sharded.chain(MOVED.rows(1, 1)).collect()
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Permutes the dimensions, as burn's [`permute`](burn::tensor::Tensor::permute): dimension `d`
    /// of the result is dimension `axes[d]`.
    #[must_use]
    #[track_caller]
    pub fn permute<Dim: AsIndex>(self, axes: [Dim; D]) -> Self {
        let axes = axes.map(|axis| dim_of("permute", axis, D));
        if axes == from_fn(|dim| dim) {
            return self;
        }
        apply(&Permute { axes }, self, |x, _| x.permute(axes))
    }

    /// Swaps two dimensions, as burn's [`swap_dims`](burn::tensor::Tensor::swap_dims).
    #[must_use]
    #[track_caller]
    pub fn swap_dims<Dim1: AsIndex, Dim2: AsIndex>(self, dim1: Dim1, dim2: Dim2) -> Self {
        let dim1 = dim_of("swap_dims", dim1, D);
        let dim2 = dim_of("swap_dims", dim2, D);
        let mut axes: [usize; D] = from_fn(|dim| dim);
        axes.swap(dim1, dim2);
        self.permute(axes)
    }

    /// Swaps the last two dimensions, as burn's [`transpose`](burn::tensor::Tensor::transpose).
    #[must_use]
    #[track_caller]
    pub fn transpose(self) -> Self {
        self.swap_dims(-2, -1)
    }

    /// Alias of [`transpose`](Self::transpose).
    #[must_use]
    #[track_caller]
    pub fn t(self) -> Self {
        self.transpose()
    }

    /// Moves dimensions `src` to the positions `dst`, as burn's
    /// [`movedim`](burn::tensor::Tensor::movedim). The others keep their order.
    #[must_use]
    #[track_caller]
    pub fn movedim<S1: MovedimArgs, S2: MovedimArgs>(self, src: S1, dst: S2) -> Self {
        let shape = self.shape();
        let why = || {
            format!("a dimension is out of range or given twice. Use different ones in -{D}..{D}")
        };
        let src = converted("movedim", &shape, || src.into_dim_vec::<D>(), why);
        let dst = converted("movedim", &shape, || dst.into_dim_vec::<D>(), why);
        if src.len() != dst.len() {
            let why = format!(
                "{} dimensions cannot move to {} positions",
                src.len(),
                dst.len()
            );
            operand_error("movedim", &[shape], why).unwind();
        }
        let mut others = (0..D).filter(|dim| !src.contains(dim));
        let axes: [usize; D] = from_fn(|place| match dst.iter().position(|&dim| dim == place) {
            Some(moved) => src[moved],
            None => others
                .next()
                .expect("the remaining dimensions fill the remaining positions"),
        });
        self.permute(axes)
    }
}
