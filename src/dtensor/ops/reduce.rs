//! Reductions.
//!
//! Along a mesh dimension that cuts a dimension which is reduced, each rank reduces its own part
//! and the result is pending; the other dimensions stay cut as they are.
//!
//! | | reduced `S(d)` | goes through |
//! |---|---|---|
//! | sum | `P(sum)` | `P(sum)`, `P(avg)` |
//! | mean: a rank's share of it | `P(sum)` | `P(sum)`, `P(avg)` |
//! | product | `P(product)` | `P(product)` |
//! | max | `P(max)` | `P(max)` |
//! | min | `P(min)` | `P(min)` |
//! | max of absolute values | `P(max)` | |
//! | any | `P(max)` | `P(max)` of Bool |
//! | all | `P(min)` | `P(min)` of Bool |
//!
//! A mean of integers is rounded, so it needs its dimensions whole. Variances are made of means
//! and sums.

use burn::tensor::{AsIndex, Bool, Int, Shape, Tensor, kind};

use super::along::{Along, along_with_indices};
use super::args::{Dims, dim_of, dims_of};
use super::placements::{AVG, MAX, MIN, PRODUCT, S, SUM};
use super::pointwise::NOTHING;
use super::{Resolved, Rule, Strategy, strategy, unary};
use crate::Result;
use crate::dtensor::{DTensor, Kind};
use crate::placement::Placement;

/// What makes the whole result of those that ranks find in their parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Parts {
    /// Their sum.
    Sum,
    /// Their product.
    Product,
    /// Their maximum. `passes`: of inputs that are yet to be reduced by a maximum, too.
    Max { passes: bool },
    /// Their minimum. `passes`: of inputs that are yet to be reduced by a minimum, too.
    Min { passes: bool },
    /// Nothing: the dimensions must be whole.
    Whole,
}

/// The rule of a reduction.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Reduce {
    name: &'static str,
    parts: Parts,
    dims: Dims,
    /// To one element in one dimension, as burn's reductions without `dim`.
    full: bool,
}

impl Rule for Reduce {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let mut output = if self.full { Shape::from([1]) } else { inputs[0].clone() };
        self.dims.iter().filter(|_| !self.full).for_each(|&dim| output[dim] = 1);
        Ok(vec![output])
    }

    fn strategies(&self, inputs: &[Shape], _outputs: &[Shape]) -> Vec<Strategy> {
        let (pending, passing): (_, &[Placement]) = match self.parts {
            Parts::Sum => (Some(SUM), &[SUM, AVG]),
            Parts::Product => (Some(PRODUCT), &[PRODUCT]),
            Parts::Max { passes } => (Some(MAX), if passes { &[MAX] } else { &[] }),
            Parts::Min { passes } => (Some(MIN), if passes { &[MIN] } else { &[] }),
            Parts::Whole => (None, &[]),
        };
        let cut = (0..inputs[0].num_dims()).filter_map(|dim| {
            let output = if self.dims.contains(&dim) { pending? } else { S(dim) };
            Some(strategy([S(dim)], [output]))
        });
        cut.chain(passing.iter().map(|&placement| strategy([placement], [placement]))).collect()
    }
}

impl Reduce {
    /// Over `dims`, which stay as dimensions of length 1.
    fn over(name: &'static str, parts: Parts, dims: &[usize]) -> Self {
        Self { name, parts, dims: dims.into(), full: false }
    }

    /// Over all dimensions of a tensor of `D`.
    fn full<const D: usize>(name: &'static str, parts: Parts) -> Self {
        Self { name, parts, dims: (0..D).collect(), full: true }
    }

    /// This rank's term of the mean: its own mean times its share of the elements. No sum of a
    /// long dimension is rounded to a narrow type on the way.
    fn mean<const D: usize, const O: usize, K: Kind + kind::Numeric>(
        &self,
        x: Tensor<D, K>,
        op: &Resolved,
        mean: impl FnOnce(Tensor<D, K>) -> Tensor<O, K>,
    ) -> Tensor<O, K> {
        if self.dims.iter().all(|&dim| op.input(0).layout().order(dim).is_empty()) {
            return mean(x);
        }
        let (local, global) = (op.input(0).local_shape(), op.input(0).shape());
        let share: f64 = self.dims.iter().map(|&dim| local[dim] as f64 / global[dim] as f64).product();
        mean(x).mul_scalar(share)
    }
}

/// Of integers a mean is rounded.
fn parts_of_mean<K: Kind>() -> Parts {
    if K::KIND == kind::Kind::Float { Parts::Sum } else { Parts::Whole }
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// The sum of all elements, as burn's [`sum`](Tensor::sum): `[1]`.
    #[must_use]
    pub fn sum(self) -> DTensor<1, K> {
        unary(&Reduce::full::<D>("sum", Parts::Sum), self, |x, _| x.sum())
    }

    /// The sum along `dim`, which stays with length 1, as burn's [`sum_dim`](Tensor::sum_dim).
    #[must_use]
    pub fn sum_dim<I: AsIndex>(self, dim: I) -> Self {
        let dim = dim_of("sum_dim", dim, D);
        unary(&Reduce::over("sum_dim", Parts::Sum, &[dim]), self, |x, _| x.sum_dim(dim))
    }

    /// The sum over `dims`, which stay with length 1, as burn's [`sum_dims`](Tensor::sum_dims).
    #[must_use]
    pub fn sum_dims<I: AsIndex>(self, dims: &[I]) -> Self {
        let dims = dims_of("sum_dims", dims, D);
        unary(&Reduce::over("sum_dims", Parts::Sum, &dims), self, |x, _| x.sum_dims(&dims))
    }

    /// The mean of all elements, as burn's [`mean`](Tensor::mean): `[1]`.
    #[must_use]
    pub fn mean(self) -> DTensor<1, K> {
        let rule = Reduce::full::<D>("mean", parts_of_mean::<K>());
        unary(&rule, self, |x, op| rule.mean(x, op, Tensor::mean))
    }

    /// The mean along `dim`, which stays with length 1, as burn's [`mean_dim`](Tensor::mean_dim).
    #[must_use]
    pub fn mean_dim<I: AsIndex>(self, dim: I) -> Self {
        let dim = dim_of("mean_dim", dim, D);
        let rule = Reduce::over("mean_dim", parts_of_mean::<K>(), &[dim]);
        unary(&rule, self, |x, op| rule.mean(x, op, |x| x.mean_dim(dim)))
    }

    /// The mean over `dims`, which stay with length 1, as burn's [`mean_dims`](Tensor::mean_dims).
    #[must_use]
    pub fn mean_dims<I: AsIndex>(self, dims: &[I]) -> Self {
        let dims = dims_of("mean_dims", dims, D);
        let rule = Reduce::over("mean_dims", parts_of_mean::<K>(), &dims);
        unary(&rule, self, |x, op| rule.mean(x, op, |x| x.mean_dims(&dims)))
    }

    /// The product of all elements, as burn's [`prod`](Tensor::prod): `[1]`.
    #[must_use]
    pub fn prod(self) -> DTensor<1, K> {
        unary(&Reduce::full::<D>("prod", Parts::Product), self, |x, _| x.prod())
    }

    /// The product along `dim`, which stays with length 1, as burn's
    /// [`prod_dim`](Tensor::prod_dim).
    #[must_use]
    pub fn prod_dim<I: AsIndex>(self, dim: I) -> Self {
        let dim = dim_of("prod_dim", dim, D);
        unary(&Reduce::over("prod_dim", Parts::Product, &[dim]), self, |x, _| x.prod_dim(dim))
    }

    /// The product over `dims`, which stay with length 1, as burn's
    /// [`prod_dims`](Tensor::prod_dims).
    #[must_use]
    pub fn prod_dims<I: AsIndex>(self, dims: &[I]) -> Self {
        let dims = dims_of("prod_dims", dims, D);
        unary(&Reduce::over("prod_dims", Parts::Product, &dims), self, |x, _| x.prod_dims(&dims))
    }
}

macro_rules! extrema {
    ($($full:ident $dim:ident $dims:ident: $parts:expr);* $(;)?) => {$(
        #[doc = concat!("Of all elements, as burn's [`", stringify!($full), "`](Tensor::", stringify!($full), "): `[1]`.")]
        #[must_use]
        pub fn $full(self) -> DTensor<1, K> {
            let rule = Reduce::full::<D>(stringify!($full), $parts);
            unary(&rule, self, |x, _| x.$full())
        }

        #[doc = concat!("Along `dim`, which stays with length 1, as burn's [`", stringify!($dim), "`](Tensor::", stringify!($dim), ").")]
        #[must_use]
        pub fn $dim<I: AsIndex>(self, dim: I) -> Self {
            let dim = dim_of(stringify!($dim), dim, D);
            let rule = Reduce::over(stringify!($dim), $parts, &[dim]);
            unary(&rule, self, |x, _| x.$dim(dim))
        }

        #[doc = concat!("Over `dims`, which stay with length 1, as burn's [`", stringify!($dims), "`](Tensor::", stringify!($dims), ").")]
        #[must_use]
        pub fn $dims<I: AsIndex>(self, dims: &[I]) -> Self {
            let dims = dims_of(stringify!($dims), dims, D);
            let rule = Reduce::over(stringify!($dims), $parts, &dims);
            unary(&rule, self, |x, _| x.$dims(&dims))
        }
    )*};
}

macro_rules! positions {
    ($($arg:ident $with_indices:ident),* $(,)?) => {$(
        #[doc = concat!("Where it is along `dim`, as burn's [`", stringify!($arg), "`](Tensor::", stringify!($arg), "): the dimension is made whole.")]
        #[must_use]
        pub fn $arg(self, dim: impl AsIndex) -> DTensor<D, Int> {
            let dim = dim_of(stringify!($arg), dim, D);
            unary(&Along::new(stringify!($arg), NOTHING, dim).with_len(1), self, |x, _| x.$arg(dim))
        }

        #[doc = concat!("The values along `dim` and where they are, as burn's [`", stringify!($with_indices), "`](Tensor::", stringify!($with_indices), "): the dimension is made whole.")]
        #[must_use]
        pub fn $with_indices<I: AsIndex>(self, dim: I) -> (Self, DTensor<D, Int>) {
            let dim = dim_of(stringify!($with_indices), dim, D);
            let rule = Along::new(stringify!($with_indices), NOTHING, dim).with_len(1);
            along_with_indices(&rule, self, |x| x.$with_indices(dim))
        }
    )*};
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    extrema! {
        max max_dim max_dims: Parts::Max { passes: true };
        min min_dim min_dims: Parts::Min { passes: true };
        max_abs max_abs_dim max_abs_dims: Parts::Max { passes: false };
    }

    positions! { argmax max_dim_with_indices, argmin min_dim_with_indices }
}

macro_rules! quantifiers {
    ($($full:ident $dim:ident: $Parts:ident),* $(,)?) => {$(
        #[doc = concat!("Of all elements, as burn's [`", stringify!($full), "`](Tensor::", stringify!($full), "): `[1]`.")]
        #[must_use]
        pub fn $full(self) -> DTensor<1, Bool> {
            let parts = Parts::$Parts { passes: self.dtype().is_bool() };
            unary(&Reduce::full::<D>(stringify!($full), parts), self, |x, _| x.$full())
        }

        #[doc = concat!("Along `dim`, which stays with length 1, as burn's [`", stringify!($dim), "`](Tensor::", stringify!($dim), ").")]
        #[must_use]
        pub fn $dim(self, dim: impl AsIndex) -> DTensor<D, Bool> {
            let dim = dim_of(stringify!($dim), dim, D);
            let parts = Parts::$Parts { passes: self.dtype().is_bool() };
            unary(&Reduce::over(stringify!($dim), parts, &[dim]), self, |x, _| x.$dim(dim))
        }
    )*};
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    quantifiers! { any any_dim: Max, all all_dim: Min }
}

impl<const D: usize> DTensor<D> {
    /// Whether an element is not a number, as burn's [`contains_nan`](Tensor::contains_nan): `[1]`.
    #[must_use]
    pub fn contains_nan(self) -> DTensor<1, Bool> {
        self.is_nan().any()
    }

    /// The variance along `dim`, as burn's [`var`](Tensor::var).
    #[must_use]
    pub fn var<I: AsIndex>(self, dim: I) -> Self {
        self.var_mean(dim).0
    }

    /// The variance along `dim` without Bessel's correction, as burn's
    /// [`var_bias`](Tensor::var_bias).
    #[must_use]
    pub fn var_bias<I: AsIndex>(self, dim: I) -> Self {
        self.var_mean_bias(dim).0
    }

    /// The variance along `dim` and the mean, as burn's [`var_mean`](Tensor::var_mean).
    #[must_use]
    pub fn var_mean<I: AsIndex>(self, dim: I) -> (Self, Self) {
        let dim = dim_of("var_mean", dim, D);
        let freedom = self.dims()[dim] as f64 - 1.0;
        self.var_mean_of(dim, freedom)
    }

    /// The variance along `dim` without Bessel's correction, and the mean, as burn's
    /// [`var_mean_bias`](Tensor::var_mean_bias).
    #[must_use]
    pub fn var_mean_bias<I: AsIndex>(self, dim: I) -> (Self, Self) {
        let dim = dim_of("var_mean_bias", dim, D);
        let freedom = self.dims()[dim] as f64;
        self.var_mean_of(dim, freedom)
    }

    /// Of a cut dimension the mean is reduced first: a few numbers, not the dimension.
    fn var_mean_of(self, dim: usize, freedom: f64) -> (Self, Self) {
        let mean = self.clone().mean_dim(dim);
        let var = self.sub(mean.clone()).square().sum_dim(dim).div_scalar(freedom);
        (var, mean)
    }
}
