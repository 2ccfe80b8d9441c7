//! Cumulative operators, sorting, medians.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("cumsum", (x: 2 = [3, 5]) => x.cumsum(1)),
        case!("cumsum", (i: 2 int(5) = [3, 2]) => i.cumsum(0)),
        case!("cumprod", (x: 2 = [3, 5]) => x.cumprod(1)),
        case!("cumprod", (x: 2 = [3, 2]) => x.prod_dim(1).cumprod(0)),
        case!("cumprod", (x: 1 tied(3) = [7]) => x.cumprod(0)),
        case!("cummax", (x: 2 = [3, 5]) => x.cummax(1)),
        case!("cummax", (x: 1 tied(3) = [7]) => x.cummax(0)),
        case!("cummin", (x: 2 = [3, 5]) => x.cummin(0)),
        case!("cummin", (x: 1 tied(3) = [7]) => x.cummin(0)),
        case!("cummin", (i: 2 int(5) = [3, 6]) => i.cummin(1)),
        case!("sort", (x: 2 = [3, 5]) => x.sort(1)),
        case!("sort", (i: 2 int(9) = [3, 2]) => i.sort(0)),
        case!("sort_descending", (x: 2 = [3, 5]) => x.sort_descending(0)),
        case!("sort_with_indices", (x: 2 = [3, 5]) => x.sort_with_indices(1)),
        case!("sort_descending_with_indices", (x: 2 = [3, 5]) => x.sort_descending_with_indices(-1)),
        case!("argsort", (x: 2 = [3, 5]) => x.argsort(1)),
        case!("argsort_descending", (x: 2 = [3, 5]) => x.argsort_descending(1)),
        case!("topk", (x: 2 = [3, 5]) => x.topk(2, 1)),
        case!("topk", (x: 2 = [3, 5]) => x.topk(3, 0)),
        case!("topk", (x: 1 = [9]) => x.topk(2, 0)),
        case!("topk_with_indices", (x: 2 = [3, 5]) => x.topk_with_indices(2, 1)),
        case!("topk_with_indices", (x: 2 = [2, 9]) => x.topk_with_indices(2, -1)),
        case!("topk_with_indices", (x: 1 tied(3) = [7]) => x.topk_with_indices(1, 0)),
        case!("argtopk", (x: 2 = [3, 5]) => x.argtopk(2, 1)),
        case!("argtopk", (i: 2 int(100) = [9, 2]) => i.argtopk(1, 0)),
        case!("median", (x: 2 = [3, 5]) => x.median(1)),
        case!("median", (x: 2 = [4, 3]) => x.median(0)),
        case!("median_with_indices", (x: 2 = [3, 4]) => x.median_with_indices(1)),
    ]
}
