//! Products of matrices and vectors.

use burn_dtensor::dtensor::ops::module::linear;

use super::{F1, F2, F3, F4};
use crate::golden::ops::call::{Row, op};

pub fn rows() -> Vec<Row> {
    vec![
        ("mm", op(|a: F2, b: F2| a.matmul(b))),
        ("matmul", op(|a: F2, b: F2| a.matmul(b))),
        ("bmm", op(|a: F3, b: F3| a.matmul(b))),
        ("matmul_3d2d", op(|a: F3, b: F2| a.matmul(b.unsqueeze()))),
        ("matmul_4d", op(|a: F4, b: F4| a.matmul(b))),
        (
            "mv",
            op(|a: F2, v: F1| a.matmul(v.unsqueeze_dim(1)).squeeze_dim::<1>(1)),
        ),
        (
            "outer",
            op(|a: F1, b: F1| a.unsqueeze_dim::<2>(1) * b.unsqueeze_dim(0)),
        ),
        (
            "addmm",
            op(|x: F1, a: F2, b: F2| x.unsqueeze() + a.matmul(b)),
        ),
        ("addmm_2d", op(|x: F2, a: F2, b: F2| x + a.matmul(b))),
        ("baddbmm", op(|x: F3, a: F3, b: F3| x + a.matmul(b))),
        (
            "linear",
            op(|x: F2, weight: F2, bias: F1| linear(x, weight.transpose(), Some(bias))),
        ),
        (
            "linear_3d",
            op(|x: F3, weight: F2, bias: F1| linear(x, weight.transpose(), Some(bias))),
        ),
        (
            "linear_nobias",
            op(|x: F2, weight: F2| linear(x, weight.transpose(), None)),
        ),
        (
            "einsum_bij_bjk",
            op(|a: F3, b: F3| F3::einsum("bij,bjk->bik", [a.into(), b.into()])),
        ),
        (
            "einsum_ij_kj",
            op(|a: F2, b: F2| F2::einsum("ij,kj->ik", [a.into(), b.into()])),
        ),
        (
            "einsum_bhqd",
            op(|q: F4, k: F4| F4::einsum("bhqd,bhkd->bhqk", [q.into(), k.into()])),
        ),
    ]
}
