//! Comparisons, masks, and what they choose.

use burn::tensor::{DType, FloatDType};

use super::F2;
use crate::golden::ops::call::{Row, op};

pub fn rows() -> Vec<Row> {
    vec![
        ("eq", op(|x: F2, y: F2| x.equal(y))),
        ("ne", op(|x: F2, y: F2| x.not_equal(y))),
        ("lt", op(|x: F2, y: F2| x.lower(y))),
        ("le", op(|x: F2, y: F2| x.lower_equal(y))),
        ("gt", op(|x: F2, y: F2| x.greater(y))),
        ("ge", op(|x: F2, y: F2| x.greater_equal(y))),
        ("gt_scalar", op(|x: F2| x.greater_scalar(0.1))),
        ("isnan", op(|x: F2| x.is_nan())),
        ("isinf", op(|x: F2| x.is_inf())),
        ("isfinite", op(|x: F2| x.is_finite())),
        ("logical_not", op(|x: F2| x.bool().bool_not())),
        (
            "logical_and",
            op(|x: F2, y: F2| x.bool().bool_and(y.bool())),
        ),
        ("logical_or", op(|x: F2, y: F2| x.bool().bool_or(y.bool()))),
        (
            "logical_xor",
            op(|x: F2, y: F2| x.bool().bool_xor(y.bool())),
        ),
        (
            "any_d1",
            op(|x: F2| x.greater_scalar(1.5).any_dim(1).squeeze_dim::<1>(1)),
        ),
        ("all_all", op(|x: F2| x.greater_scalar(-2.0).all())),
        (
            "count_nonzero",
            op(|x: F2| x.greater_scalar(0.0).int().sum()),
        ),
        (
            "where",
            op(|x: F2, y: F2| y.mask_where(x.clone().greater_scalar(0.0), x)),
        ),
        (
            "where_scalar",
            op(|x: F2| x.clone().mask_fill(x.lower_equal_scalar(0.0), 0.0)),
        ),
        (
            "masked_fill",
            op(|x: F2, y: F2| x.mask_fill(y.greater_scalar(0.0), -1.0)),
        ),
        ("clamp", op(|x: F2| x.clamp(-0.5, 0.75))),
        ("clamp_min", op(|x: F2| x.clamp_min(0.1))),
        ("clip_max", op(|x: F2| x.clamp_max(0.1))),
        ("zeros_like", op(|x: F2| x.zeros_like())),
        ("ones_like", op(|x: F2| x.ones_like())),
        ("to_f64", op(|x: F2| x.cast(DType::F64))),
        (
            "to_bf16_back",
            op(|x: F2| x.cast(FloatDType::BF16).cast(FloatDType::F32)),
        ),
    ]
}
