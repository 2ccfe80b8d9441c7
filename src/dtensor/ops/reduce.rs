//! Reductions.
//!
//! Along a mesh dimension that cuts a dimension which is reduced, each rank reduces its own part
//! and the result is partial; the other dimensions stay cut as they are.
//!
//! Variances are made of means and sums.

use burn::tensor::{AsIndex, Bool, Tensor, kind};

use super::args::{dim_of, dims_of, operand_error};
use super::methods::reductions;
use super::partial_rules::{INCREASING_FROM, INCREASING_TO, LINEAR, NO_PARTIAL, PartialRules};
use super::placements::PRODUCT;
use super::{EinsumRule, Operator, apply};
use crate::dtensor::{DTensor, Kind};
use crate::placement::PartialOp;

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    reductions! {
        sum sum_dim sum_dims -> K: [with_partial_rules(LINEAR)];
        prod prod_dim prod_dims -> K: [reduced_by(PartialOp::Product).with_partial_rules(PartialRules::same_for_all(&[PRODUCT]))];
    }

    /// The sum over `dims`, without them, as burn's [`sum_dims_squeeze`](Tensor::sum_dims_squeeze).
    #[must_use]
    #[track_caller]
    pub fn sum_dims_squeeze<const D2: usize, I: AsIndex>(self, dims: &[I]) -> DTensor<D2, K> {
        self.sum_dims(dims).squeeze_dims(dims)
    }

    /// The mean of all elements, as burn's [`mean`](Tensor::mean): `[1]`.
    #[must_use]
    #[track_caller]
    pub fn mean(self) -> DTensor<1, K> {
        let all: [usize; D] = std::array::from_fn(|dim| dim);
        let local = |x, op: &Operator| share(x, op, &all, Tensor::mean);
        if is_rounded::<K>() { apply(&FULL_MEAN.at(all), self, local) } else { apply(&MEAN, self, local) }
    }

    /// The mean along `dim`, which stays with length 1, as burn's [`mean_dim`](Tensor::mean_dim).
    #[must_use]
    #[track_caller]
    pub fn mean_dim<I: AsIndex>(self, dim: I) -> Self {
        let dim = dim_of("mean_dim", dim, D);
        let rule = const { mean_over::<K>("mean_dim") }.at([dim]);
        apply(&rule, self, |x, op| share(x, op, &[dim], |x| x.mean_dim(dim)))
    }

    /// The mean over `dims`, which stay with length 1, as burn's [`mean_dims`](Tensor::mean_dims).
    #[must_use]
    #[track_caller]
    pub fn mean_dims<I: AsIndex>(self, dims: &[I]) -> Self {
        let dims = dims_of("mean_dims", dims, D);
        let rule = const { mean_over::<K>("mean_dims") }.at(dims.iter().copied());
        apply(&rule, self, |x, op| share(x, op, &dims, |x| x.mean_dims(&dims)))
    }
}

const MEAN: EinsumRule = EinsumRule::new("mean", ".. -> 1").with_partial_rules(LINEAR);
const FULL_MEAN: EinsumRule = EinsumRule::new("mean", "..D.. -> 1");

/// Of integers a mean is rounded: it needs its dimensions whole.
const fn is_rounded<K: Kind>() -> bool {
    !matches!(K::KIND, kind::Kind::Float)
}

const fn mean_over<K: Kind>(name: &'static str) -> EinsumRule {
    if is_rounded::<K>() {
        EinsumRule::new(name, ".._.. -> ..1..")
    } else {
        EinsumRule::new(name, "..d.. -> ..1..").with_partial_rules(LINEAR)
    }
}

/// This rank's term of the mean over `dims`: its own mean times its share of the elements. No sum of a
/// long dimension is rounded to a narrow type on the way.
fn share<const D: usize, const O: usize, K: Kind + kind::Numeric>(
    x: Tensor<D, K>,
    op: &Operator,
    dims: &[usize],
    mean: impl FnOnce(Tensor<D, K>) -> Tensor<O, K>,
) -> Tensor<O, K> {
    let spec = op.input_spec(0);
    if dims.iter().all(|&dim| spec.layout().shard_order(dim).is_empty()) {
        return mean(x);
    }
    let (local, global) = (spec.local_shape(), spec.shape());
    let share: f64 = dims.iter().map(|&dim| local[dim] as f64 / global[dim] as f64).product();
    mean(x).mul_scalar(share)
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    reductions! {
        max max_dim max_dims -> K: [reduced_by(PartialOp::Max).with_partial_rules(INCREASING_TO)];
        min min_dim min_dims -> K: [reduced_by(PartialOp::Min).with_partial_rules(INCREASING_FROM)];
        max_abs max_abs_dim max_abs_dims -> K: [reduced_by(PartialOp::Max)];
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    // What is yet to be made a maximum is only one of truth values.
    reductions! {
        any any_dim -> Bool: [reduced_by(PartialOp::Max).with_partial_rules(if is_bool::<K>() { INCREASING_TO } else { NO_PARTIAL })];
        all all_dim -> Bool: [reduced_by(PartialOp::Min).with_partial_rules(if is_bool::<K>() { INCREASING_FROM } else { NO_PARTIAL })];
    }
}

const fn is_bool<K: Kind>() -> bool {
    matches!(K::KIND, kind::Kind::Bool)
}

impl<const D: usize> DTensor<D> {
    /// Whether an element is not a number, as burn's [`contains_nan`](Tensor::contains_nan): `[1]`.
    #[must_use]
    #[track_caller]
    pub fn contains_nan(self) -> DTensor<1, Bool> {
        self.is_nan().any()
    }

    /// The variance along `dim`, as burn's [`var`](Tensor::var).
    #[must_use]
    #[track_caller]
    pub fn var<I: AsIndex>(self, dim: I) -> Self {
        self.var_mean(dim).0
    }

    /// The variance along `dim` without Bessel's correction, as burn's
    /// [`var_bias`](Tensor::var_bias).
    #[must_use]
    #[track_caller]
    pub fn var_bias<I: AsIndex>(self, dim: I) -> Self {
        self.var_mean_bias(dim).0
    }

    /// The variance along `dim` and the mean, as burn's [`var_mean`](Tensor::var_mean).
    #[must_use]
    #[track_caller]
    pub fn var_mean<I: AsIndex>(self, dim: I) -> (Self, Self) {
        let dim = dim_of("var_mean", dim, D);
        let freedom = self.dims()[dim] as f64 - 1.0;
        self.var_mean_of(dim, freedom)
    }

    /// The variance along `dim` without Bessel's correction, and the mean, as burn's
    /// [`var_mean_bias`](Tensor::var_mean_bias).
    #[must_use]
    #[track_caller]
    pub fn var_mean_bias<I: AsIndex>(self, dim: I) -> (Self, Self) {
        let dim = dim_of("var_mean_bias", dim, D);
        let freedom = self.dims()[dim] as f64;
        self.var_mean_of(dim, freedom)
    }

    /// The covariances of what lies along `dim`, less `correction_factor` degrees of freedom, as burn's
    /// [`cov`](Tensor::cov): of a matrix `[samples, variables]` and `dim` 0 `[variables, variables]`.
    ///
    /// Where samples are cut, ranks add up their terms of the means and of the products.
    #[must_use]
    #[track_caller]
    pub fn cov<I: AsIndex>(self, dim: I, correction_factor: usize) -> Self {
        let dim = dim_of("cov", dim, D);
        if D < 2 {
            operand_error("cov", &[self.shape()], "it is of matrices; give at least 2 dimensions").unwind();
        }
        let freedom = self.dims()[dim] as f32 - correction_factor as f32;
        let centered = (self.clone() - self.mean_dim(dim)).swap_dims(dim, 0);
        centered.clone().transpose().matmul(centered).div_scalar(freedom)
    }

    /// Of a cut dimension the mean is reduced first: a few numbers, not the dimension.
    fn var_mean_of(self, dim: usize, freedom: f64) -> (Self, Self) {
        let mean = self.clone().mean_dim(dim);
        let var = self.sub(mean.clone()).square().sum_dim(dim).div_scalar(freedom);
        (var, mean)
    }
}
