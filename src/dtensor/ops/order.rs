//! Sorting and what it finds: the dimension whole, any other cut.

use burn::tensor::{AsIndex, Int, Tensor, kind};

use super::along::{Along, along, along_with_indices};
use super::args::{dim_of, misfit};
use super::pointwise::NOTHING;
use super::unary;
use crate::dtensor::{DTensor, Kind};

macro_rules! sorts {
    ($($name:ident),* $(,)?) => {$(
        #[doc = concat!("Along `dim`, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        pub fn $name<I: AsIndex>(self, dim: I) -> Self {
            let dim = dim_of(stringify!($name), dim, D);
            along(&Along::new(stringify!($name), NOTHING, dim), self, |x| x.$name(dim))
        }
    )*};
}

macro_rules! sorts_with_indices {
    ($($name:ident),* $(,)?) => {$(
        #[doc = concat!("Along `dim`, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), "): values and where they were.")]
        #[must_use]
        pub fn $name<I: AsIndex>(self, dim: I) -> (Self, DTensor<D, Int>) {
            let dim = dim_of(stringify!($name), dim, D);
            along_with_indices(&Along::new(stringify!($name), NOTHING, dim), self, |x| x.$name(dim))
        }
    )*};
}

macro_rules! positions {
    ($($name:ident),* $(,)?) => {$(
        #[doc = concat!("Positions along `dim`, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        pub fn $name<I: AsIndex>(self, dim: I) -> DTensor<D, Int> {
            let dim = dim_of(stringify!($name), dim, D);
            unary(&Along::new(stringify!($name), NOTHING, dim), self, |x, _| x.$name(dim))
        }
    )*};
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    sorts! { sort, sort_descending }

    sorts_with_indices! { sort_with_indices, sort_descending_with_indices }

    positions! { argsort, argsort_descending }

    /// The `k` largest along `dim`, the largest first, as burn's [`topk`](Tensor::topk).
    #[must_use]
    pub fn topk<I: AsIndex>(self, k: usize, dim: I) -> Self {
        let dim = self.top("topk", k, dim);
        along(&Along::new("topk", NOTHING, dim).with_len(k), self, |x| x.topk(k, dim))
    }

    /// [`topk`](Self::topk), and where they were, as burn's
    /// [`topk_with_indices`](Tensor::topk_with_indices).
    #[must_use]
    pub fn topk_with_indices<I: AsIndex>(self, k: usize, dim: I) -> (Self, DTensor<D, Int>) {
        let dim = self.top("topk_with_indices", k, dim);
        along_with_indices(&Along::new("topk_with_indices", NOTHING, dim).with_len(k), self, |x| {
            x.topk_with_indices(k, dim)
        })
    }

    /// Where the `k` largest along `dim` are, as burn's [`argtopk`](Tensor::argtopk).
    #[must_use]
    pub fn argtopk(self, k: usize, dim: impl AsIndex) -> DTensor<D, Int> {
        let dim = self.top("argtopk", k, dim);
        // burn's own refuses `k` as large as the dimension.
        let local = |x: Tensor<D, K>| if x.dims()[dim] > k { x.argtopk(k, dim) } else { x.argsort_descending(dim) };
        unary(&Along::new("argtopk", NOTHING, dim).with_len(k), self, |x, _| local(x))
    }

    /// `dim`, if it has at least `k` elements.
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
    /// The median along `dim`, the lower of two, as burn's [`median`](Tensor::median).
    #[must_use]
    pub fn median<I: AsIndex>(self, dim: I) -> Self {
        let dim = dim_of("median", dim, D);
        along(&Along::new("median", NOTHING, dim).with_len(1), self, |x| x.median(dim))
    }

    /// [`median`](Self::median), and where it was, as burn's
    /// [`median_with_indices`](Tensor::median_with_indices).
    #[must_use]
    pub fn median_with_indices<I: AsIndex>(self, dim: I) -> (Self, DTensor<D, Int>) {
        let dim = dim_of("median_with_indices", dim, D);
        let rule = Along::new("median_with_indices", NOTHING, dim).with_len(1);
        along_with_indices(&rule, self, |x| x.median_with_indices(dim))
    }
}
