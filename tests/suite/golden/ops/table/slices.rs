//! Parts, and what is made of parts.

use burn::tensor::ops::PadMode;
use burn::tensor::s;
use burn_dtensor::dtensor::DTensor;

use super::{F1, F2};
use crate::golden::ops::call::{Row, Wanted, op};

pub fn rows() -> Vec<Row> {
    vec![
        (
            "slice_d0",
            op(|x: F2, Wanted([rows, _]): Wanted<2>| x.slice_dim(0, 1..1 + rows)),
        ),
        (
            "slice_d1",
            op(|x: F2, Wanted([_, columns]): Wanted<2>| x.slice_dim(1, 1..1 + columns)),
        ),
        ("slice_d1_full", op(|x: F2| x.slice([.., ..]))),
        ("slice_step", op(|x: F2| x.slice_dim(0, s![..;2]))),
        (
            "narrow_d0",
            op(|x: F2, Wanted([rows, _]): Wanted<2>| x.narrow(0, 0, rows)),
        ),
        ("select_d0", op(|x: F2| x.select_dim::<1>(0, 1))),
        ("select_d1", op(|x: F2| x.select_dim::<1>(1, 2))),
        ("select_neg", op(|x: F2| x.select_dim::<1>(1, -1))),
        (
            "unbind",
            op(|x: F2| {
                x.iter_dim(1)
                    .map(|column| column.squeeze_dim::<1>(1))
                    .collect::<Vec<F1>>()
            }),
        ),
        (
            "split_d0",
            op(|x: F2, Wanted([rows, _]): Wanted<2>| x.split(rows, 0)),
        ),
        (
            "split_d1_uneven",
            op(|x: F2, Wanted([_, first]): Wanted<2>| {
                let rest = x.dims()[1] - first;
                x.split_with_sizes(vec![first, rest], 1)
            }),
        ),
        ("chunk_d0", op(|x: F2| x.chunk(2, 0))),
        ("chunk_d1", op(|x: F2| x.chunk(2, 1))),
        ("cat_d0", op(|x: F2, y: F2| DTensor::cat(vec![x, y], 0))),
        ("cat_d1", op(|x: F2, y: F2| DTensor::cat(vec![x, y], 1))),
        (
            "stack_d0",
            op(|x: F2, y: F2| DTensor::stack::<3>(vec![x, y], 0)),
        ),
        (
            "stack_dm1",
            op(|x: F2, y: F2| DTensor::stack::<3>(vec![x, y], 2)),
        ),
        ("flip_d0", op(|x: F2| x.flip([0]))),
        ("roll_d0", op(|x: F2| x.roll_dim(1, 0))),
        ("roll_d1", op(|x: F2| x.roll_dim(1, 1))),
        (
            "pad",
            op(|x: F2| x.pad((1, 1, 0, 0), PadMode::Constant(0.0))),
        ),
        (
            "diagonal",
            op(|x: F2, Wanted([len]): Wanted<1>| {
                x.slice([0..len, 0..len])
                    .tril(0)
                    .triu(0)
                    .sum_dim(1)
                    .squeeze_dim::<1>(1)
            }),
        ),
        ("tril", op(|x: F2| x.tril(0))),
        ("triu1", op(|x: F2| x.triu(1))),
    ]
}
