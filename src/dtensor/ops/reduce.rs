//! Reductions.
//!
//! If a reduced dimension is sharded along a mesh dimension, each rank reduces its shard and the
//! result is partial there. The sharding of other dimensions is kept.
//!
//! Variances are computed from means and sums.

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
        sum sum_dim sum_dims -> K: [with_partial_rules(LINEAR)] "";
        prod prod_dim prod_dims -> K: [reduced_by(PartialOp::Product).with_partial_rules(PartialRules::same_for_all(&[PRODUCT]))] "";
    }

    /// Returns the sum over `dims`, which are removed, as burn's
    /// [`sum_dims_squeeze`](Tensor::sum_dims_squeeze).
    #[must_use]
    #[track_caller]
    pub fn sum_dims_squeeze<const D2: usize, I: AsIndex>(self, dims: &[I]) -> DTensor<D2, K> {
        self.sum_dims(dims).squeeze_dims(dims)
    }

    /// Returns the mean of all elements, as burn's [`mean`](Tensor::mean). Shape: `[1]`.
    #[must_use]
    #[track_caller]
    pub fn mean(self) -> DTensor<1, K> {
        let all: [usize; D] = std::array::from_fn(|dim| dim);
        let local = |x, op: &Operator| share(x, op, &all, Tensor::mean);
        if is_rounded::<K>() {
            apply(&FULL_MEAN.at(all), self, local)
        } else {
            apply(&MEAN, self, local)
        }
    }

    /// Returns the mean along `dim`, which then has length 1, as burn's
    /// [`mean_dim`](Tensor::mean_dim).
    #[must_use]
    #[track_caller]
    pub fn mean_dim<I: AsIndex>(self, dim: I) -> Self {
        let dim = dim_of("mean_dim", dim, D);
        let rule = const { mean_over::<K>("mean_dim") }.at([dim]);
        apply(&rule, self, |x, op| {
            share(x, op, &[dim], |x| x.mean_dim(dim))
        })
    }

    /// Returns the mean over `dims`, which then have length 1, as burn's
    /// [`mean_dims`](Tensor::mean_dims).
    #[must_use]
    #[track_caller]
    pub fn mean_dims<I: AsIndex>(self, dims: &[I]) -> Self {
        let dims = dims_of("mean_dims", dims, D);
        let rule = const { mean_over::<K>("mean_dims") }.at(dims.iter().copied());
        apply(&rule, self, |x, op| {
            share(x, op, &dims, |x| x.mean_dims(&dims))
        })
    }
}

const MEAN: EinsumRule = EinsumRule::new("mean", ".. -> 1").with_partial_rules(LINEAR);
const FULL_MEAN: EinsumRule = EinsumRule::new("mean", "..D.. -> 1");

/// Returns true for integers: their mean is rounded, so its dimensions must not be sharded.
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

/// Returns this rank's contribution to the mean over `dims`: the mean of its elements times its
/// share of all elements. A sum over a long dimension is thus never rounded to a narrow type.
fn share<const D: usize, const O: usize, K: Kind + kind::Numeric>(
    x: Tensor<D, K>,
    op: &Operator,
    dims: &[usize],
    mean: impl FnOnce(Tensor<D, K>) -> Tensor<O, K>,
) -> Tensor<O, K> {
    let spec = op.input_spec(0);
    if dims
        .iter()
        .all(|&dim| spec.layout().shard_order(dim).is_empty())
    {
        return mean(x);
    }
    let local = spec.local_shape();
    let global = spec.shape();
    let share: f64 = dims
        .iter()
        .map(|&dim| local[dim] as f64 / global[dim] as f64)
        .product();
    mean(x).mul_scalar(share)
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    reductions! {
        max max_dim max_dims -> K: [reduced_by(PartialOp::Max).with_partial_rules(INCREASING_TO)]
            "If several ranks hold the maximum, they share its gradient evenly; on one device, the first of the equal elements has all of it. The result is NaN if an element is.";
        min min_dim min_dims -> K: [reduced_by(PartialOp::Min).with_partial_rules(INCREASING_FROM)]
            "If several ranks hold the minimum, they share its gradient evenly; on one device, the first of the equal elements has all of it. The result is NaN if an element is.";
        max_abs max_abs_dim max_abs_dims -> K: [reduced_by(PartialOp::Max)]
            "If several ranks hold the maximum, they share its gradient evenly; on one device, the first of the equal elements has all of it. The result is NaN if an element is.";
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    // Partial inputs are accepted only if they are Bool: for numbers, a pending maximum is not the
    // maximum of truth values.
    reductions! {
        any any_dim -> Bool: [reduced_by(PartialOp::Max).with_partial_rules(if is_bool::<K>() { INCREASING_TO } else { NO_PARTIAL })] "";
        all all_dim -> Bool: [reduced_by(PartialOp::Min).with_partial_rules(if is_bool::<K>() { INCREASING_FROM } else { NO_PARTIAL })] "";
    }
}

const fn is_bool<K: Kind>() -> bool {
    matches!(K::KIND, kind::Kind::Bool)
}

impl<const D: usize> DTensor<D> {
    /// Returns true if any element is NaN, as burn's [`contains_nan`](Tensor::contains_nan). Shape:
    /// `[1]`.
    #[must_use]
    #[track_caller]
    pub fn contains_nan(self) -> DTensor<1, Bool> {
        self.is_nan().any()
    }

    /// Returns the variance along `dim`, as burn's [`var`](Tensor::var).
    #[must_use]
    #[track_caller]
    pub fn var<I: AsIndex>(self, dim: I) -> Self {
        self.var_mean(dim).0
    }

    /// Returns the variance along `dim` without Bessel's correction, as burn's
    /// [`var_bias`](Tensor::var_bias).
    #[must_use]
    #[track_caller]
    pub fn var_bias<I: AsIndex>(self, dim: I) -> Self {
        self.var_mean_bias(dim).0
    }

    /// Returns the variance along `dim` and the mean, as burn's [`var_mean`](Tensor::var_mean).
    #[must_use]
    #[track_caller]
    pub fn var_mean<I: AsIndex>(self, dim: I) -> (Self, Self) {
        let dim = dim_of("var_mean", dim, D);
        let freedom = self.dims()[dim] as f64 - 1.0;
        self.var_mean_of(dim, freedom)
    }

    /// Returns the variance along `dim` without Bessel's correction, and the mean, as burn's
    /// [`var_mean_bias`](Tensor::var_mean_bias).
    #[must_use]
    #[track_caller]
    pub fn var_mean_bias<I: AsIndex>(self, dim: I) -> (Self, Self) {
        let dim = dim_of("var_mean_bias", dim, D);
        let freedom = self.dims()[dim] as f64;
        self.var_mean_of(dim, freedom)
    }

    /// Returns the covariances of samples along `dim`, as burn's [`cov`](Tensor::cov).
    /// `correction_factor` is subtracted from the degrees of freedom. For a matrix `[samples,
    /// variables]` and `dim` 0, the result is `[variables, variables]`.
    ///
    /// If samples are sharded, the ranks sum their contributions to the means and to the products.
    #[must_use]
    #[track_caller]
    pub fn cov<I: AsIndex>(self, dim: I, correction_factor: usize) -> Self {
        let dim = dim_of("cov", dim, D);
        if D < 2 {
            operand_error(
                "cov",
                &[self.shape()],
                "it is for matrices. Pass at least 2 dimensions",
            )
            .unwind();
        }
        let freedom = self.dims()[dim] as f32 - correction_factor as f32;
        let centered = (self.clone() - self.mean_dim(dim)).swap_dims(dim, 0);
        centered
            .clone()
            .transpose()
            .matmul(centered)
            .div_scalar(freedom)
    }

    /// If the dimension is sharded, the mean is reduced first: this sends a few numbers instead of
    /// the dimension.
    fn var_mean_of(self, dim: usize, freedom: f64) -> (Self, Self) {
        let mean = self.clone().mean_dim(dim);
        let var = self
            .sub(mean.clone())
            .square()
            .sum_dim(dim)
            .div_scalar(freedom);
        (var, mean)
    }
}
