//! Element by element.

use std::f32::consts::LN_2;

use super::{F1, F2, F3};
use crate::golden::ops::call::{Row, op};

pub fn rows() -> Vec<Row> {
    vec![
        ("sin", op(|x: F2| x.sin())),
        ("cos", op(|x: F2| x.cos())),
        ("tanh", op(|x: F2| x.tanh())),
        ("exp", op(|x: F2| x.exp())),
        ("expm1", op(|x: F2| x.exp() - 1.0)),
        ("log", op(|x: F2| x.log())),
        ("log1p", op(|x: F2| x.log1p())),
        ("log2", op(|x: F2| x.log() / LN_2)),
        ("sqrt", op(|x: F2| x.sqrt())),
        ("rsqrt", op(|x: F2| x.sqrt().recip())),
        ("reciprocal", op(|x: F2| x.recip())),
        ("square", op(|x: F2| x.square())),
        ("pow_scalar", op(|x: F2| x.powf_scalar(3.0))),
        ("pow_half", op(|x: F2| x.powf_scalar(0.5))),
        ("pow_tensor", op(|x: F2, y: F2| x.powf(y))),
        ("neg", op(|x: F2| -x)),
        ("positive", op(|x: F2| x)),
        ("clone", op(|x: F2| x.clone())),
        ("abs", op(|x: F2| x.abs())),
        ("sign", op(|x: F2| x.sign())),
        ("erf", op(|x: F2| x.erf())),
        ("floor", op(|x: F2| x.floor())),
        ("ceil", op(|x: F2| x.ceil())),
        ("round", op(|x: F2| x.round())),
        ("trunc", op(|x: F2| x.trunc())),
        ("atan2", op(|x: F2, y: F2| x.atan2(y))),
        // With scalars.
        ("add_scalar", op(|x: F2| x + 1.5)),
        ("sub_scalar", op(|x: F2| x - 0.5)),
        ("rsub_scalar", op(|x: F2| 1.0 - x)),
        ("mul_scalar", op(|x: F2| x * 2.5)),
        ("div_scalar", op(|x: F2| x / 4.0)),
        // Of two and three.
        ("add", op(|x: F2, y: F2| x + y)),
        ("sub", op(|x: F2, y: F2| x - y)),
        ("mul", op(|x: F2, y: F2| x * y)),
        ("div", op(|x: F2, y: F2| x / y)),
        ("maximum", op(|x: F2, y: F2| x.max_pair(y))),
        ("minimum", op(|x: F2, y: F2| x.min_pair(y))),
        ("add_alpha", op(|x: F2, y: F2| x + y * 2.0)),
        ("lerp", op(|x: F2, y: F2| x.clone() + (y - x) * 0.25)),
        ("addcmul", op(|x: F2, y: F2, z: F2| x + y * z * 0.5)),
        ("addcdiv", op(|x: F2, y: F2, z: F2| x + y / z * 0.5)),
        // With broadcasting: torch prepends dimensions, burn is told where.
        ("add_bcast_row", op(|x: F2, row: F1| x + row.unsqueeze())),
        ("mul_bcast_row", op(|x: F2, row: F1| x * row.unsqueeze())),
        ("mul_bcast_col", op(|x: F2, column: F2| x * column)),
        ("add_bcast_outer", op(|column: F2, row: F2| column + row)),
        ("add_bcast_3d2d", op(|x: F3, y: F2| x + y.unsqueeze())),
        // Torch writes to the first input; burn's operators do so where nobody else holds it.
        ("inplace_add", op(|x: F2, y: F2| x + y)),
        ("inplace_mul_scalar", op(|x: F2| x * 2.0)),
        ("inplace_copy", op(|_: F2, y: F2| y)),
    ]
}
