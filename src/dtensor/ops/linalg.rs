//! Linear algebra, with the names of [`burn::linalg`].
//!
//! Norms and products are composed of other operators, so a sharded dimension is never gathered:
//! the ranks' partial sums or maxima are reduced. [Decompositions](lu) need complete matrices, but
//! batches may be sharded.

mod decompositions;

use burn::tensor::{AsIndex, ElementConversion, kind};

pub use burn::linalg::Norm;
pub use decompositions::{det, lu, qr, svd};

use super::args::{TensorDims, dim_of, dims_of, operand_error};
use super::partial_rules::MOVED;
use super::{EinsumRule, apply, lookup};
use crate::dtensor::{DTensor, Kind};

macro_rules! norms {
    ($($doc:literal $name:ident $dims:ident $(<$K:ident: $Bound:ident>)? ($($p:ident)?): $norm:expr),* $(,)?) => {$(
        #[doc = concat!($doc, " along `dim`, which then has length 1.")]
        #[must_use]
        #[track_caller]
        pub fn $name<const D: usize $(, $K: Kind + kind::$Bound)?>(
            x: DTensor<D $(, $K)?>,
            $($p: f64,)?
            dim: impl AsIndex,
        ) -> DTensor<D $(, $K)?> {
            let dim = dim_of(stringify!($name), dim, D);
            $norm(x, &[dim], $($p)?)
        }

        #[doc = concat!($doc, " over `dims`, which then have length 1.")]
        #[must_use]
        #[track_caller]
        pub fn $dims<const D: usize $(, $K: Kind + kind::$Bound)?, I: AsIndex>(
            x: DTensor<D $(, $K)?>,
            $($p: f64,)?
            dims: &[I],
        ) -> DTensor<D $(, $K)?> {
            let dims: TensorDims = dims_of(stringify!($dims), dims, D);
            $norm(x, &dims, $($p)?)
        }
    )*};
}

norms! {
    "Returns the number of elements that are not zero" l0_norm l0_norm_dims<K: Numeric> (): l0,
    "Returns the sum of the absolute values" l1_norm l1_norm_dims<K: Numeric> (): l1,
    "Returns the Euclidean norm" l2_norm l2_norm_dims (): l2,
    "Returns the largest absolute value" max_abs_norm max_abs_norm_dims<K: Ordered> (): max_abs,
    "Returns the smallest absolute value" min_abs_norm min_abs_norm_dims<K: Ordered> (): min_abs,
    "Returns the `p`-norm, for any `p`," lp_norm lp_norm_dims (p): lp,
}

fn l0<const D: usize, K: Kind + kind::Numeric>(x: DTensor<D, K>, dims: &[usize]) -> DTensor<D, K> {
    x.zeros_like()
        .mask_fill(x.not_equal_scalar(0), 1)
        .sum_dims(dims)
}

fn l1<const D: usize, K: Kind + kind::Numeric>(x: DTensor<D, K>, dims: &[usize]) -> DTensor<D, K> {
    x.abs().sum_dims(dims)
}

fn l2<const D: usize>(x: DTensor<D>, dims: &[usize]) -> DTensor<D> {
    x.square().sum_dims(dims).sqrt()
}

fn max_abs<const D: usize, K: Kind + kind::Ordered>(
    x: DTensor<D, K>,
    dims: &[usize],
) -> DTensor<D, K> {
    x.max_abs_dims(dims)
}

fn min_abs<const D: usize, K: Kind + kind::Ordered>(
    x: DTensor<D, K>,
    dims: &[usize],
) -> DTensor<D, K> {
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

/// Returns the `norm` of vectors along `dim`, which then has length 1.
#[must_use]
#[track_caller]
pub fn vector_norm<const D: usize>(
    x: DTensor<D>,
    norm: impl Into<Norm>,
    dim: impl AsIndex,
) -> DTensor<D> {
    lp(
        x,
        &[dim_of("vector_norm", dim, D)],
        norm.into().to_exponent(),
    )
}

/// Returns the `norm` over `dims`, which then have length 1.
#[must_use]
#[track_caller]
pub fn vector_norm_dims<const D: usize, I: AsIndex>(
    x: DTensor<D>,
    norm: impl Into<Norm>,
    dims: &[I],
) -> DTensor<D> {
    lp(
        x,
        &dims_of("vector_norm_dims", dims, D),
        norm.into().to_exponent(),
    )
}

/// Divides vectors along `dim` by their `norm`, or by `eps` if that is larger.
#[must_use]
#[track_caller]
pub fn vector_normalize<const D: usize, E: ElementConversion>(
    x: DTensor<D>,
    norm: impl Into<Norm>,
    dim: impl AsIndex,
    eps: E,
) -> DTensor<D> {
    let dim = dim_of("vector_normalize", dim, D);
    let norm = lp(x.clone(), &[dim], norm.into().to_exponent()).clamp_min(eps);
    x / norm
}

/// Returns the cosine of the angle between vectors along `dim`, which then has length 1. A vector
/// is taken to be at least `eps` long; the default is the smallest positive normal number of the
/// type.
#[must_use]
#[track_caller]
pub fn cosine_similarity<const D: usize>(
    x1: DTensor<D>,
    x2: DTensor<D>,
    dim: impl AsIndex,
    eps: Option<f64>,
) -> DTensor<D> {
    let dim = dim_of("cosine_similarity", dim, D);
    let eps = eps.unwrap_or_else(|| {
        x1.dtype()
            .finfo()
            .expect("the tensor has a float type")
            .min_positive
    });
    let normalized = |x: DTensor<D>| vector_normalize(x, Norm::L2, dim, eps);
    (normalized(x1.clone()) * normalized(x2)).sum_dim(dim)
}

/// Returns the products of all elements of `lhs` with all elements of `rhs` along the last
/// dimension: `[.., m]` and `[.., n]` to `[.., m, n]`. The other dimensions broadcast.
#[must_use]
#[track_caller]
pub fn outer<const D: usize, const R: usize, K: Kind + kind::Numeric>(
    lhs: DTensor<D, K>,
    rhs: DTensor<D, K>,
) -> DTensor<R, K> {
    outer_dim(lhs, rhs, -1)
}

/// Like [`outer`], but along `dim`, which the two new dimensions replace.
#[must_use]
#[track_caller]
pub fn outer_dim<const D: usize, const R: usize, Dim: AsIndex, K: Kind + kind::Numeric>(
    lhs: DTensor<D, K>,
    rhs: DTensor<D, K>,
    dim: Dim,
) -> DTensor<R, K> {
    let dim = dim_of("outer_dim", dim, D);
    if R != D + 1 {
        let why = format!(
            "the result has {} dimensions, but {R} were requested",
            D + 1
        );
        operand_error("outer_dim", &[lhs.shape(), rhs.shape()], why).unwind();
    }
    lhs.unsqueeze_dim::<R>(dim + 1) * rhs.unsqueeze_dim::<R>(dim)
}

/// Multiplies matrices `[.., m, n]` by vectors `[.., n]`: `[.., m]`. The other dimensions
/// broadcast.
#[must_use]
#[track_caller]
pub fn matvec<const DM: usize, const DV: usize, K: Kind + kind::Numeric>(
    matrix: DTensor<DM, K>,
    vector: DTensor<DV, K>,
) -> DTensor<DV, K> {
    if DM < 2 || DM != DV + 1 {
        let why =
            "matrices must have at least 2 dimensions, and vectors one less than the matrices";
        operand_error("matvec", &[matrix.shape(), vector.shape()], why).unwind();
    }
    matrix
        .matmul(vector.unsqueeze_dim::<DM>(DV))
        .squeeze_dim(DM - 1)
}

const DIAG: EinsumRule = EinsumRule::new("diag", "..MN -> ..K").with_partial_rules(MOVED);

/// Returns the diagonals of matrices: `[.., m, n]` to `[.., min(m, n)]`.
#[must_use]
#[track_caller]
pub fn diag<const D: usize, const DO: usize, K: Kind>(tensor: DTensor<D, K>) -> DTensor<DO, K> {
    let len = matrix("diag", &tensor, DO + 1)
        .into_iter()
        .min()
        .unwrap_or(0);
    let dtype = tensor.dtype();
    apply(&DIAG.lens([len]), tensor, |x, _| {
        lookup::of_type(burn::linalg::diag(x), dtype)
    })
}

/// Returns the sums of the diagonals of matrices: `[.., m, n]` to `[.., 1]`.
#[must_use]
#[track_caller]
pub fn trace<const D: usize, const DO: usize>(tensor: DTensor<D>) -> DTensor<DO> {
    matrix("trace", &tensor, DO + 1);
    diag::<D, DO, _>(tensor).sum_dim(DO - 1)
}

/// Returns the numbers of rows and columns of matrices, after checking that they have `rank`
/// dimensions.
#[track_caller]
fn matrix<const D: usize, K: Kind>(
    operator: &'static str,
    x: &DTensor<D, K>,
    rank: usize,
) -> [usize; 2] {
    if D < 2 || D != rank {
        let why = format!(
            "the requested result needs matrices of {rank} dimensions, at least 2, but these have {D}"
        );
        operand_error(operator, &[x.shape()], why).unwind();
    }
    [x.dims()[D - 2], x.dims()[D - 1]]
}
