//! Shapes, and the order of dimensions.

use super::{F2, F3};
use crate::golden::ops::call::{Row, Wanted, op};

pub fn rows() -> Vec<Row> {
    vec![
        ("view_flatten", op(|x: F2| x.flatten::<1>(0, 1))),
        (
            "view_split_d0",
            op(|x: F2, Wanted(shape): Wanted<3>| x.reshape(shape)),
        ),
        (
            "view_split_d0_inner",
            op(|x: F2, Wanted(shape): Wanted<3>| x.reshape(shape)),
        ),
        (
            "view_split_d1",
            op(|x: F2, Wanted(shape): Wanted<3>| x.reshape(shape)),
        ),
        (
            "unflatten_1",
            op(|x: F2, Wanted(shape): Wanted<3>| x.reshape(shape)),
        ),
        (
            "reshape_merge01",
            op(|x: F3, Wanted(shape): Wanted<2>| x.reshape(shape)),
        ),
        (
            "reshape_merge12",
            op(|x: F3, Wanted(shape): Wanted<2>| x.reshape(shape)),
        ),
        (
            "reshape_cross",
            op(|x: F2, Wanted(shape): Wanted<2>| x.reshape(shape)),
        ),
        ("flatten_1", op(|x: F3| x.flatten::<2>(1, 2))),
        (
            "view_heads",
            op(|x: F3, Wanted([batch, heads, len, width]): Wanted<4>| {
                x.reshape([batch, len, heads, width]).swap_dims(1, 2)
            }),
        ),
        ("permute", op(|x: F3| x.permute([2, 0, 1]))),
        ("transpose", op(|x: F2| x.transpose())),
        ("t", op(|x: F2| x.t())),
        ("movedim", op(|x: F3| x.movedim(0, 2))),
        ("transpose_contig", op(|x: F3| x.swap_dims(1, 2))),
        ("unsqueeze0", op(|x: F2| x.unsqueeze_dim::<3>(0))),
        ("unsqueeze_m1", op(|x: F2| x.unsqueeze_dim::<3>(2))),
        ("squeeze_1", op(|x: F3| x.squeeze_dim::<2>(1))),
        ("squeeze_all", op(|x: F3| x.squeeze::<2>())),
        (
            "expand",
            op(|x: F2, Wanted(shape): Wanted<3>| x.expand(shape)),
        ),
        (
            "expand_1",
            op(|x: F2, Wanted(shape): Wanted<2>| x.expand(shape)),
        ),
        ("repeat", op(|x: F2| x.repeat(&[2, 1]))),
        ("repeat_1_3", op(|x: F2| x.repeat(&[1, 3]))),
        (
            "repeat_interleave",
            op(|x: F2, Wanted(shape): Wanted<2>| {
                x.unsqueeze_dim::<3>(1).repeat_dim(1, 2).reshape(shape)
            }),
        ),
        (
            "repeat_interleave1",
            op(|x: F2, Wanted(shape): Wanted<2>| {
                x.unsqueeze_dim::<3>(2).repeat_dim(2, 2).reshape(shape)
            }),
        ),
        (
            "kron",
            op(|a: F2, b: F2, Wanted(shape): Wanted<2>| {
                let [[m, n], [p, q]] = [a.dims(), b.dims()];
                (a.reshape([m, 1, n, 1]) * b.reshape([1, p, 1, q])).reshape(shape)
            }),
        ),
    ]
}
