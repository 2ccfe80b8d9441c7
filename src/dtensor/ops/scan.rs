//! Cumulative operators: the dimension whole, any other cut.
//!
//! | | goes through |
//! |---|---|
//! | `cumsum` | `P(sum)`, `P(avg)` |
//! | `cumprod` | `P(product)` |
//! | `cummax` | `P(max)` |
//! | `cummin` | `P(min)` |

use burn::tensor::{AsIndex, kind};

use super::along::{Along, along};
use super::args::dim_of;
use super::placements::{MAX, MIN, PRODUCT};
use super::pointwise::{LINEAR, Table};
use crate::dtensor::{DTensor, Kind};

const PRODUCTS: Table = Table::new(&[(&[PRODUCT], PRODUCT)]);
const MAXIMA: Table = Table::new(&[(&[MAX], MAX)]);
const MINIMA: Table = Table::new(&[(&[MIN], MIN)]);

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
        along(&Along::new("cumprod", PRODUCTS, dim), self, |x| x.cumprod(dim))
    }
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    scan! { cummax: MAXIMA, cummin: MINIMA }
}
