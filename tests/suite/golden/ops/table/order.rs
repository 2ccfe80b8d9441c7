//! Sorting, and running totals.

use super::F2;
use crate::golden::ops::call::{Row, op};

pub fn rows() -> Vec<Row> {
    vec![
        ("sort_d1", op(|x: F2| x.sort_with_indices(1))),
        (
            "sort_d0_desc",
            op(|x: F2| x.sort_descending_with_indices(0)),
        ),
        ("argsort_d1", op(|x: F2| x.argsort(1))),
        ("topk_d0", op(|x: F2| x.topk_with_indices(3, 0))),
        ("topk_d1", op(|x: F2| x.topk_with_indices(2, 1))),
        ("cumsum_d0", op(|x: F2| x.cumsum(0))),
        ("cumsum_d1", op(|x: F2| x.cumsum(1))),
        ("cumprod_d1", op(|x: F2| x.cumprod(1))),
        (
            "logcumsumexp",
            op(|x: F2| {
                let largest = x.clone().max_dim(1).detach();
                (x - largest.clone()).exp().cumsum(1).log() + largest
            }),
        ),
    ]
}
