//! Along a dimension that is whole on every rank: sorting and what it finds, cumulative operators.

use burn::tensor::{AsIndex, Int, Tensor, kind};

use super::args::{dim_of, misfit};
use super::methods::along;
use super::partials::{INCREASING_FROM, INCREASING_TO, LINEAR, Partials};
use super::placements::PRODUCT;
use super::{Axes, apply};
use crate::dtensor::{DTensor, Kind};

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    along! {
        cumsum -> Self: "..D.. -> ..D.." [through(LINEAR)];
        cumprod -> Self: "..D.. -> ..D.." [through(Partials::alike(&[PRODUCT]))];
    }
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    along! {
        cummax -> Self: "..D.. -> ..D.." [through(INCREASING_TO)];
        cummin -> Self: "..D.. -> ..D.." [through(INCREASING_FROM)];
        sort -> Self: "..D.. -> ..D..";
        sort_descending -> Self: "..D.. -> ..D..";
        sort_with_indices -> (Self, DTensor<D, Int>): "..D.. -> ..D.., ..D..";
        sort_descending_with_indices -> (Self, DTensor<D, Int>): "..D.. -> ..D.., ..D..";
        argsort -> DTensor<D, Int>: "..D.. -> ..D..";
        argsort_descending -> DTensor<D, Int>: "..D.. -> ..D..";
        argmax -> DTensor<D, Int>: ".._.. -> ..1..";
        argmin -> DTensor<D, Int>: ".._.. -> ..1..";
        max_dim_with_indices -> (Self, DTensor<D, Int>): ".._.. -> ..1.., ..1..";
        min_dim_with_indices -> (Self, DTensor<D, Int>): ".._.. -> ..1.., ..1..";
    }

    /// The `k` largest along `dim`, the largest first, as burn's [`topk`](Tensor::topk).
    #[must_use]
    #[track_caller]
    pub fn topk<I: AsIndex>(self, k: usize, dim: I) -> Self {
        let dim = self.top("topk", k, dim);
        apply(&const { Axes::new("topk", ".._.. -> ..K..") }.at([dim]).lens([k]), self, |x, _| x.topk(k, dim))
    }

    /// [`topk`](Self::topk), and where they were, as burn's
    /// [`topk_with_indices`](Tensor::topk_with_indices).
    #[must_use]
    #[track_caller]
    pub fn topk_with_indices<I: AsIndex>(self, k: usize, dim: I) -> (Self, DTensor<D, Int>) {
        let dim = self.top("topk_with_indices", k, dim);
        let rule = &const { Axes::new("topk_with_indices", ".._.. -> ..K.., ..K..") };
        apply(&rule.at([dim]).lens([k]), self, |x, _| x.topk_with_indices(k, dim))
    }

    /// Where the `k` largest along `dim` are, as burn's [`argtopk`](Tensor::argtopk).
    #[must_use]
    #[track_caller]
    pub fn argtopk(self, k: usize, dim: impl AsIndex) -> DTensor<D, Int> {
        let dim = self.top("argtopk", k, dim);
        // burn's own refuses `k` as large as the dimension.
        let local = |x: Tensor<D, K>| if x.dims()[dim] > k { x.argtopk(k, dim) } else { x.argsort_descending(dim) };
        apply(&const { Axes::new("argtopk", ".._.. -> ..K..") }.at([dim]).lens([k]), self, |x, _| local(x))
    }

    /// `dim`, if it has at least `k` elements.
    #[track_caller]
    fn top(&self, operator: &'static str, k: usize, dim: impl AsIndex) -> usize {
        let dim = dim_of(operator, dim, D);
        let len = self.dims()[dim];
        if k > len {
            let why = format!("dimension {dim} has {len} elements, ask for at most so many, not {k}");
            misfit(operator, &[self.shape()], why).unwind();
        }
        dim
    }
}

impl<const D: usize> DTensor<D> {
    along! {
        median -> Self: ".._.. -> ..1..";
        median_with_indices -> (Self, DTensor<D, Int>): ".._.. -> ..1.., ..1..";
    }
}
