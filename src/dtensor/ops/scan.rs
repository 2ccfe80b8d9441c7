//! Cumulative operators: the dimension whole, any other cut.
//!
//! | | goes through |
//! |---|---|
//! | `cumsum` | `P(sum)`, `P(avg)` |
//! | `cumprod` | `P(product)` |
//! | `cummax` | `P(max)` |
//! | `cummin` | `P(min)` |

use burn::tensor::{AsIndex, Tensor, kind};

use super::along::{Along, along};
use super::args::dim_of;
use super::placements::{MAX, MIN, PRODUCT};
use super::pointwise::{LINEAR, Table};
use crate::dtensor::{DTensor, Kind};

const PRODUCTS: Table = &[(&[PRODUCT], PRODUCT)];
const MAXIMA: Table = &[(&[MAX], MAX)];
const MINIMA: Table = &[(&[MIN], MIN)];

macro_rules! scan {
    ($($name:ident: $table:expr),* $(,)?) => {$(
        #[doc = concat!("Along `dim`, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        pub fn $name<I: AsIndex>(self, dim: I) -> Self {
            let dim = dim_of(stringify!($name), dim, D);
            along(&Along::new(stringify!($name), $table, dim), self, |x| x.$name(dim))
        }
    )*};
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    scan! { cumsum: LINEAR }

    /// Along `dim`, as burn's [`cumprod`](burn::tensor::Tensor::cumprod).
    #[must_use]
    pub fn cumprod<I: AsIndex>(self, dim: I) -> Self {
        let dim = dim_of("cumprod", dim, D);
        // The derivative of an empty product, burn-flex 0.22 aborts on; that of a sum is as empty.
        let local = |x: Tensor<D, K>| if x.shape().num_elements() > 0 { x.cumprod(dim) } else { x.cumsum(dim) };
        along(&Along::new("cumprod", PRODUCTS, dim), self, local)
    }
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    scan! { cummax: MAXIMA, cummin: MINIMA }
}
