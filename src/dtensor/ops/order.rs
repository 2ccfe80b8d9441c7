//! Operators along a dimension: cumulative ones, extrema and their positions, the `k` largest,
//! sorting, medians.
//!
//! If the dimension is sharded, all but sorting and medians exchange a few elements per
//! [shard](ShardSummaries). Sorting and medians need the full dimension: if there is another
//! dimension, an all-to-all shards that one instead; otherwise the dimension is gathered.

use std::panic::Location;

use burn::tensor::{AsIndex, DType, Int, Tensor, kind};

use super::args::{dim_of, operand_error};
use super::methods::along;
use super::partial_rules::{INCREASING_FROM, INCREASING_TO, LINEAR, PartialRules};
use super::placements::PRODUCT;
use super::shard_summaries::{ShardSummaries, untracked};
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};
use crate::error::OrUnwind;

/// Defines cumulative operators, from the partial inputs that they accept and the value before the
/// first element.
macro_rules! scans {
    ($($name:ident [$partials:expr, $start:path]);* $(;)?) => {$(
        #[doc = concat!("Applies burn's [`", stringify!($name), "`](Tensor::", stringify!($name), ") along `dim`.")]
        ///
        /// # Collective
        /// If `dim` is sharded: every rank of the mesh. Forward gathers one element of every shard;
        /// backward reduce-scatters their gradients. Half precision is computed in single
        /// precision.
        #[must_use]
        #[track_caller]
        pub fn $name<I: AsIndex>(self, dim: I) -> Self {
            let (dim, at) = (dim_of(stringify!($name), dim, D), Location::caller());
            let axes = &const { EinsumRule::new(stringify!($name), "..d.. -> ..d..").with_partial_rules($partials) };
            apply(&axes.at([dim]).with_slots(1), self, |x, op| match ShardSummaries::of(op, dim, at) {
                Some(parts) => parts.scan(x, $start, |x| x.$name(dim)).or_unwind(),
                None => x.$name(dim),
            })
        }
    )*};
}

/// Defines extrema with their indices, and the indices alone.
macro_rules! extrema {
    ($($with_indices:ident $indices:ident);* $(;)?) => {$(
        #[doc = concat!("Applies burn's [`", stringify!($with_indices), "`](Tensor::", stringify!($with_indices), ") along `dim`.")]
        ///
        /// # Collective
        /// If `dim` is sharded: every rank of the mesh. The results of all shards are gathered, and
        /// all ranks have the final result.
        #[must_use]
        #[track_caller]
        pub fn $with_indices<I: AsIndex>(self, dim: I) -> (Self, DTensor<D, Int>) {
            let (dim, at) = (dim_of(stringify!($with_indices), dim, D), Location::caller());
            let dtype = self.dtype();
            let axes = &const { EinsumRule::new(stringify!($with_indices), "..d.. -> ..1.., ..1..") };
            let (values, indices) = apply(&axes.at([dim]).with_slots(2), self, |x, op| match ShardSummaries::of(op, dim, at) {
                Some(parts) => parts.pick(x, 1, |x| x.$with_indices(dim)).or_unwind(),
                None => x.$with_indices(dim),
            });
            (values, in_index_type(indices, dtype, |x: Tensor<D, K>| x.$indices(dim)))
        }

        #[doc = concat!("Applies burn's [`", stringify!($indices), "`](Tensor::", stringify!($indices), ") along `dim`.")]
        ///
        /// # Collective
        #[doc = concat!("As for [`", stringify!($with_indices), "`](Self::", stringify!($with_indices), ").")]
        #[must_use]
        #[track_caller]
        pub fn $indices(self, dim: impl AsIndex) -> DTensor<D, Int> {
            let (dim, at) = (dim_of(stringify!($indices), dim, D), Location::caller());
            let dtype = self.dtype();
            let axes = &const { EinsumRule::new(stringify!($indices), "..d.. -> ..1..") };
            let indices = apply(&axes.at([dim]).with_slots(2), self, |x, op| match ShardSummaries::of(op, dim, at) {
                Some(parts) => parts.pick(untracked(&x), 1, |x| x.$with_indices(dim)).or_unwind().1,
                None => x.$indices(dim),
            });
            in_index_type(indices, dtype, |x: Tensor<D, K>| x.$indices(dim))
        }
    )*};
}

/// Defines sorting with indices, and the indices alone.
macro_rules! sorts {
    ($($with_indices:ident $indices:ident);* $(;)?) => {$(
        #[doc = concat!("Applies burn's [`", stringify!($with_indices), "`](Tensor::", stringify!($with_indices), ") along `dim`. Sharding rule: `..D.. -> ..D.., ..D..`.")]
        #[must_use]
        #[track_caller]
        pub fn $with_indices<I: AsIndex>(self, dim: I) -> (Self, DTensor<D, Int>) {
            let dim = dim_of(stringify!($with_indices), dim, D);
            let dtype = self.dtype();
            let axes = &const { EinsumRule::new(stringify!($with_indices), "..D.. -> ..D.., ..D..") };
            let (values, indices) = apply(&axes.at([dim]), self, |x, _| x.$with_indices(dim));
            (values, in_index_type(indices, dtype, |x: Tensor<D, K>| x.$indices(dim)))
        }

        #[doc = concat!("Applies burn's [`", stringify!($indices), "`](Tensor::", stringify!($indices), ") along `dim`. Sharding rule: `..D.. -> ..D..`.")]
        #[must_use]
        #[track_caller]
        pub fn $indices<I: AsIndex>(self, dim: I) -> DTensor<D, Int> {
            let dim = dim_of(stringify!($indices), dim, D);
            let dtype = self.dtype();
            let axes = &const { EinsumRule::new(stringify!($indices), "..D.. -> ..D..") };
            let indices = apply(&axes.at([dim]), self, |x, _| x.$indices(dim));
            in_index_type(indices, dtype, |x: Tensor<D, K>| x.$indices(dim))
        }
    )*};
}

/// Returns `indices` of elements of type `dtype` in the integer type that burn's operator `find`
/// returns. They are in another one only if they are empty: [`apply`] makes empty results itself,
/// in the type of the input, but the type of indices depends on the operator and the backend.
fn in_index_type<const D: usize, K: Kind + kind::Ordered>(
    indices: DTensor<D, Int>,
    dtype: DType,
    find: impl FnOnce(Tensor<D, K>) -> Tensor<D, Int>,
) -> DTensor<D, Int> {
    if !matches!(K::KIND, kind::Kind::Int) || indices.spec.shape().num_elements() > 0 {
        return indices;
    }
    let device = indices.device();
    let dtype = find(Tensor::zeros([1; D], (&device, dtype))).dtype();
    let empty = Tensor::zeros(indices.local.shape(), (&device, dtype));
    DTensor::from_parts(empty, indices.spec.in_dtype(dtype))
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    scans! {
        cumsum [LINEAR, Tensor::zeros_like];
        cumprod [PartialRules::same_for_all(&[PRODUCT]), Tensor::ones_like];
    }
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    // The value before the first shard is its first element, which is among its elements anyway.
    scans! {
        cummax [INCREASING_TO, Tensor::clone];
        cummin [INCREASING_FROM, Tensor::clone];
    }

    extrema! {
        max_dim_with_indices argmax;
        min_dim_with_indices argmin;
    }

    along! {
        sort -> Self: "..D.. -> ..D..";
        sort_descending -> Self: "..D.. -> ..D..";
    }

    sorts! {
        sort_with_indices argsort;
        sort_descending_with_indices argsort_descending;
    }

    /// Returns the `k` largest elements along `dim`, the largest first, as burn's
    /// [`topk`](Tensor::topk).
    ///
    /// # Collective
    /// As for [`topk_with_indices`](Self::topk_with_indices).
    #[must_use]
    #[track_caller]
    pub fn topk<I: AsIndex>(self, k: usize, dim: I) -> Self {
        let dim = self.top("topk", k, dim);
        let at = Location::caller();
        let axes = &const { EinsumRule::new("topk", "..d.. -> ..K..") };
        apply(
            &axes.at([dim]).lens([k]).with_slots(2 * k),
            self,
            |x, op| match ShardSummaries::of(op, dim, at) {
                Some(parts) => {
                    parts
                        .pick(x, k, |x| x.topk_with_indices(k, dim))
                        .or_unwind()
                        .0
                }
                None => x.topk(k, dim),
            },
        )
    }

    /// Returns the `k` largest elements along `dim` and their indices, as burn's
    /// [`topk_with_indices`](Tensor::topk_with_indices). Among equal elements, the choice is
    /// unspecified, as in burn.
    ///
    /// # Collective
    /// If `dim` is sharded: every rank of the mesh gathers the `k` largest of each shard. It
    /// gathers the dimension instead if that is smaller or if a shard has fewer than `k` elements.
    /// All ranks have the result.
    #[must_use]
    #[track_caller]
    pub fn topk_with_indices<I: AsIndex>(self, k: usize, dim: I) -> (Self, DTensor<D, Int>) {
        let dim = self.top("topk_with_indices", k, dim);
        let at = Location::caller();
        let dtype = self.dtype();
        let axes = &const { EinsumRule::new("topk_with_indices", "..d.. -> ..K.., ..K..") };
        let (values, indices) = apply(
            &axes.at([dim]).lens([k]).with_slots(2 * k),
            self,
            |x, op| match ShardSummaries::of(op, dim, at) {
                Some(parts) => parts
                    .pick(x, k, |x| x.topk_with_indices(k, dim))
                    .or_unwind(),
                None => x.topk_with_indices(k, dim),
            },
        );
        let indices = in_index_type(indices, dtype, |x: Tensor<D, K>| {
            x.topk_with_indices(1, dim).1
        });
        (values, indices)
    }

    /// Returns the indices of the `k` largest elements along `dim`, as burn's
    /// [`argtopk`](Tensor::argtopk).
    ///
    /// # Collective
    /// As for [`topk_with_indices`](Self::topk_with_indices).
    #[must_use]
    #[track_caller]
    pub fn argtopk(self, k: usize, dim: impl AsIndex) -> DTensor<D, Int> {
        let dim = self.top("argtopk", k, dim);
        let at = Location::caller();
        let dtype = self.dtype();
        // burn's own function panics if `k` is as large as the dimension.
        let local = |x: Tensor<D, K>| {
            if x.dims()[dim] > k {
                x.argtopk(k, dim)
            } else {
                x.argsort_descending(dim)
            }
        };
        let axes = &const { EinsumRule::new("argtopk", "..d.. -> ..K..") };
        let indices = apply(
            &axes.at([dim]).lens([k]).with_slots(2 * k),
            self,
            |x, op| match ShardSummaries::of(op, dim, at) {
                Some(parts) => {
                    parts
                        .pick(untracked(&x), k, |x| x.topk_with_indices(k, dim))
                        .or_unwind()
                        .1
                }
                None => local(x),
            },
        );
        in_index_type(indices, dtype, |x: Tensor<D, K>| x.argsort_descending(dim))
    }

    /// Returns `dim`, after checking that it has at least `k` elements.
    #[track_caller]
    fn top(&self, operator: &'static str, k: usize, dim: impl AsIndex) -> usize {
        let dim = dim_of(operator, dim, D);
        let len = self.dims()[dim];
        if k > len {
            let why = format!(
                "dimension {dim} has {len} elements, fewer than {k}. Request at most that many"
            );
            operand_error(operator, &[self.shape()], why).unwind();
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
