//! Norms of vectors, with the names of `burn::linalg`.
//!
//! They are made of reductions, so a cut dimension is never gathered: ranks send their parts of
//! the sum, or of the maximum.

use burn::tensor::AsIndex;

use super::args::{Dims, dim_of, dims_of};
use crate::dtensor::DTensor;

macro_rules! norms {
    ($($doc:literal $name:ident $dims:ident ($($p:ident)?): $norm:expr),* $(,)?) => {$(
        #[doc = concat!($doc, " along `dim`, which stays with length 1.")]
        #[must_use]
        #[track_caller]
        pub fn $name<const D: usize>(x: DTensor<D>, $($p: f64,)? dim: impl AsIndex) -> DTensor<D> {
            let dim = dim_of(stringify!($name), dim, D);
            $norm(x, &[dim], $($p)?)
        }

        #[doc = concat!($doc, " over `dims`, which stay with length 1.")]
        #[must_use]
        #[track_caller]
        pub fn $dims<const D: usize, I: AsIndex>(x: DTensor<D>, $($p: f64,)? dims: &[I]) -> DTensor<D> {
            let dims: Dims = dims_of(stringify!($dims), dims, D);
            $norm(x, &dims, $($p)?)
        }
    )*};
}

norms! {
    "How many elements are not zero," l0_norm l0_norm_dims (): l0,
    "The sum of the absolute values" l1_norm l1_norm_dims (): l1,
    "The Euclidean norm" l2_norm l2_norm_dims (): l2,
    "The largest absolute value" max_abs_norm max_abs_norm_dims (): max_abs,
    "The smallest absolute value" min_abs_norm min_abs_norm_dims (): min_abs,
    "The `p`-norm, for any `p`," lp_norm lp_norm_dims (p): lp,
}

fn l0<const D: usize>(x: DTensor<D>, dims: &[usize]) -> DTensor<D> {
    x.zeros_like().mask_fill(x.not_equal_scalar(0), 1).sum_dims(dims)
}

fn l1<const D: usize>(x: DTensor<D>, dims: &[usize]) -> DTensor<D> {
    x.abs().sum_dims(dims)
}

fn l2<const D: usize>(x: DTensor<D>, dims: &[usize]) -> DTensor<D> {
    x.square().sum_dims(dims).sqrt()
}

fn max_abs<const D: usize>(x: DTensor<D>, dims: &[usize]) -> DTensor<D> {
    x.max_abs_dims(dims)
}

fn min_abs<const D: usize>(x: DTensor<D>, dims: &[usize]) -> DTensor<D> {
    x.abs().min_dims(dims)
}

fn lp<const D: usize>(x: DTensor<D>, dims: &[usize], p: f64) -> DTensor<D> {
    match p {
        0.0 => l0(x, dims),
        1.0 => l1(x, dims),
        2.0 => l2(x, dims),
        f64::INFINITY => max_abs(x, dims),
        f64::NEG_INFINITY => min_abs(x, dims),
        _ => x.abs().powf_scalar(p).sum_dims(dims).powf_scalar(p.recip()),
    }
}
