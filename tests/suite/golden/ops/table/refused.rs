//! What torch refuses in every case. It has no values then, and its arguments are not recorded:
//! ours are held to the local operator.

use burn_dtensor::dtensor::DTensor;
use burn_dtensor::placement::Placement::Replicate;

use super::{F2, I1};
use crate::golden::ops::call::{Row, op};

pub fn rows() -> Vec<Row> {
    vec![
        (
            "cdist",
            op(|x: F2, y: F2| {
                (x.unsqueeze_dim::<3>(1) - y.unsqueeze_dim(0))
                    .square()
                    .sum_dim(2)
                    .sqrt()
                    .squeeze_dim::<2>(2)
            }),
        ),
        (
            "bucketize",
            op(|x: F2| {
                let above = |boundary: f64| x.clone().greater_scalar(boundary).int();
                above(-1.0) + above(0.0) + above(1.0)
            }),
        ),
        (
            "isin_unique",
            op(|x: F2| {
                let x = x.round();
                x.clone().equal_scalar(-1.0).bool_or(x.equal_scalar(2.0))
            }),
        ),
        (
            "masked_select_skip",
            op(|x: F2| x.clone().mask_select(x.greater_scalar(0.0))),
        ),
        (
            "nonzero",
            op(|x: F2| {
                let [rows, columns] = x.dims();
                let replicate = vec![Replicate; x.mesh().ndim()];
                let places = I1::arange(
                    0..(rows * columns) as i64,
                    x.mesh(),
                    &replicate,
                    x.mesh().device(),
                );
                let places = places
                    .expect("a layout")
                    .reshape([rows, columns])
                    .mask_select(x.greater_scalar(0.0));
                let columns = columns as i64;
                DTensor::stack::<2>(vec![places.clone() / columns, places % columns], 1)
            }),
        ),
    ]
}
