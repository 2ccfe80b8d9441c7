//! Cumulative operators, sorting, medians.

use super::{Operator, operator, step};

macro_rules! along {
    ($($name:literal $draw:ident $kind:ident => |$x:ident, $dim:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [1 2 3], |d| {
            let ($x, $dim) = (d.$draw::<D>(), d.below(D));
            step!(($x: $kind<D>) [$dim] => $expr)
        })),*]
    };
}

/// The `k` first along a dimension.
macro_rules! first {
    ($($name:literal $draw:ident $kind:ident => |$x:ident, $k:ident, $dim:ident| $expr:expr;)*) => {
        vec![$(operator!($name, |d| {
            let ($x, $dim) = (d.$draw::<2>(), d.below(2));
            // Burn asserts that an index is left over.
            let $k = 1 + d.below(d.shape::<2>($x)[$dim].checked_sub(1).filter(|most| *most > 0)?);
            step!(($x: $kind<2>) [$k, $dim] => $expr)
        })),*]
    };
}

pub fn operators() -> Vec<Operator> {
    let mut all = along! {
        "cumsum" any Float => |x, dim| x.cumsum(dim);
        "cumprod" any Float => |x, dim| x.cumprod(dim);
        "cummax" any Float => |x, dim| x.cummax(dim);
        "cummin" any Float => |x, dim| x.cummin(dim);
        "sort" any Float => |x, dim| x.sort(dim);
        "sort_descending" any Float => |x, dim| x.sort_descending(dim);
        "sort_with_indices" any Float => |x, dim| x.sort_with_indices(dim);
        "sort_descending_with_indices" any Float => |x, dim| x.sort_descending_with_indices(dim);
        "argsort" any Float => |x, dim| x.argsort(dim);
        "argsort_descending" any Float => |x, dim| x.argsort_descending(dim);
        "median" any Float => |x, dim| x.median(dim);
        "median_with_indices" any Float => |x, dim| x.median_with_indices(dim);
        "cumsum" any_ints Int => |i, dim| i.cumsum(dim);
        "cummin" any_ints Int => |i, dim| i.cummin(dim);
        "sort" any_ints Int => |i, dim| i.sort(dim);
    };
    all.extend(first! {
        "topk" any Float => |x, k, dim| x.topk(k, dim);
        "topk_with_indices" any Float => |x, k, dim| x.topk_with_indices(k, dim);
        "argtopk" any Float => |x, k, dim| x.argtopk(k, dim);
        "argtopk" any_ints Int => |i, k, dim| i.argtopk(k, dim);
    });
    all
}
