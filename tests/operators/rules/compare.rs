//! Comparisons, logic, casts, masks, clamps and tensors of one value.

use burn::tensor::{FloatDType, IntDType};
use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    [comparisons(), logic(), casts(), masks(), likes()]
        .into_iter()
        .flatten()
        .collect()
}

fn comparisons() -> Vec<Case> {
    vec![
        case!("equal", (i: 2 int(2) = [3, 2], j: 2 int(2) = [3, 2]) => i.equal(j)),
        case!("equal", (m: 1 bool = [3], n: 1 bool = [3]) => m.equal(n)),
        case!("not_equal", (i: 2 int(2) = [3, 2], j: 2 int(2) = [1, 2]) => i.not_equal(j)),
        case!("equal_scalar", (i: 2 int(3) = [3, 2]) => i.equal_scalar(1)),
        case!("equal_elem", (i: 2 int(3) = [3, 2]) => i.equal_elem(2)),
        case!("not_equal_scalar", (i: 2 int(3) = [3, 2]) => i.not_equal_scalar(1)),
        case!("not_equal_elem", (i: 2 int(3) = [3, 2]) => i.not_equal_elem(2)),
        case!("greater", (a: 2 = [3, 2], b: 2 = [3, 2]) => a.greater(b)),
        case!("greater_equal", (i: 2 int(3) = [3, 2], j: 2 int(3) = [3, 1]) => i.greater_equal(j)),
        case!("lower", (a: 2 = [3, 2], b: 2 = [3, 2]) => a.lower(b)),
        case!("lower_equal", (i: 2 int(3) = [3, 2], j: 2 int(3) = [3, 1]) => i.lower_equal(j)),
        case!("greater_scalar", (x: 2 = [3, 6]) => x.greater_scalar(0.2)),
        case!("greater_elem", (x: 2 = [3, 6]) => x.greater_elem(0.2)),
        case!("greater_equal_scalar", (i: 2 int(5) = [3, 2]) => i.greater_equal_scalar(2)),
        case!("greater_equal_elem", (i: 2 int(5) = [3, 2]) => i.greater_equal_elem(2)),
        case!("lower_scalar", (x: 2 = [3, 6]) => x.lower_scalar(0.2)),
        case!("lower_elem", (x: 2 = [3, 6]) => x.lower_elem(0.2)),
        case!("lower_equal_scalar", (i: 2 int(5) = [3, 2]) => i.lower_equal_scalar(2)),
        case!("lower_equal_elem", (i: 2 int(5) = [3, 2]) => i.lower_equal_elem(2)),
        case!("is_nan", (x: 2 = [3, 2]) => x.sqrt().is_nan()),
        case!("is_inf", (x: 2 = [3, 2]) => x.clamp_min(0.0).log().is_inf()),
        case!("is_finite", (x: 2 = [3, 2]) => x.sqrt().is_finite()),
        case!("all_close", (x: 2 = [3, 6]) => {
            let close = [1e-3, 2.0].map(|by| x.clone().all_close(x.clone() + by, None, Some(1.0)));
            x.clone() * f32::from(u8::from(close[0])) + x * f32::from(u8::from(close[1]))
        }),
        case!("into_scalar", (x: 2 = [3, 6]) => x.clone() * x.detach().sum().into_scalar::<f32>()),
        case!("into_scalar", (i: 2 int(9) = [3, 6]) => i.clone() + i.max_dims(&[0, 1]).into_scalar::<i64>()),
        case!("is_close", (a: 2 = [3, 2], b: 2 = [3, 2]) => a.is_close(b, Some(0.5), None)),
        case!("contains_nan", (x: 2 = [3, 2]) => x.sqrt().contains_nan()),
        case!("contains_nan", (x: 2 positive = [3, 2]) => x.sqrt().contains_nan()),
    ]
}

fn logic() -> Vec<Case> {
    vec![
        case!("bool_not", (m: 2 bool = [3, 2]) => (m.clone().bool_not(), !m)),
        case!("bool_and", (m: 2 bool = [3, 2], n: 2 bool = [3, 2]) => (m.clone().bool_and(n.clone()), m & n)),
        case!("bool_or", (m: 2 bool = [3, 2], n: 2 bool = [1, 2]) => (m.clone().bool_or(n.clone()), m | n)),
        case!("bool_xor", (m: 2 bool = [3, 2], n: 2 bool = [3, 2]) => (m.clone().bool_xor(n.clone()), m ^ n)),
        // A partial "or" or "and" comes out of a comparison.
        case!("bool_not", (x: 2 = [3, 2]) => x.greater_scalar(0.2).bool_not()),
        case!("bool_and", (x: 2 = [3, 2], m: 2 bool = [3, 2]) => x.greater_scalar(0.2).bool_and(m)),
        case!("bool_or", (x: 2 = [3, 2], m: 2 bool = [3, 2]) => x.greater_scalar(0.2).bool_or(m)),
        case!("bitwise_not", (i: 2 int(5) = [3, 2]) => i.bitwise_not()),
        case!("bitwise_and", (i: 1 int(9) = [3], j: 1 int(9) = [3]) => i.bitwise_and(j)),
        case!("bitwise_or", (i: 1 int(9) = [3], j: 1 int(9) = [3]) => i.bitwise_or(j)),
        case!("bitwise_xor", (i: 1 int(9) = [3], j: 1 int(9) = [3]) => i.bitwise_xor(j)),
        case!("bitwise_left_shift", (i: 1 int(9) = [3], j: 1 int(3) = [3]) => i.bitwise_left_shift(j)),
        case!("bitwise_right_shift", (i: 1 int(9) = [3], j: 1 int(3) = [3]) => i.bitwise_right_shift(j)),
        case!("bitwise_and_scalar", (i: 2 int(9) = [3, 2]) => i.bitwise_and_scalar(5)),
        case!("bitwise_or_scalar", (i: 2 int(9) = [3, 2]) => i.bitwise_or_scalar(5)),
        case!("bitwise_xor_scalar", (i: 2 int(9) = [3, 2]) => i.bitwise_xor_scalar(5)),
        case!("bitwise_left_shift_scalar", (i: 2 int(9) = [3, 2]) => i.bitwise_left_shift_scalar(2)),
        case!("bitwise_right_shift_scalar", (i: 2 int(9) = [3, 2]) => i.bitwise_right_shift_scalar(1)),
    ]
}

fn casts() -> Vec<Case> {
    vec![
        case!("cast", (x: 2 = [3, 6]) => x.cast(FloatDType::F64)),
        case!("cast", (x: 2 = [3, 2]) => x.cast(IntDType::I32)),
        case!("cast", (i: 2 int(5) = [3, 2]) => (i.clone().cast(IntDType::I64), i.cast(FloatDType::F32))),
        case!("cast", (m: 2 bool = [3, 2]) => (m.clone().cast(IntDType::I64), m.cast(FloatDType::F32))),
        case!("int", (x: 2 = [3, 6]) => x.int()),
        case!("int", (m: 2 bool = [3, 2]) => m.int()),
        case!("int", (x: 2 = [3, 2]) => x.greater_scalar(0.2).int()),
        case!("float", (i: 2 int(5) = [3, 6]) => i.float()),
        case!("float", (m: 2 bool = [3, 2]) => m.float()),
        case!("bool", (i: 2 int(2) = [3, 2]) => i.bool()),
    ]
}

fn masks() -> Vec<Case> {
    vec![
        case!("mask_where", (x: 2 = [3, 2], m: 2 bool = [3, 2], y: 2 = [3, 2]) => x.mask_where(m, y)),
        case!("mask_where", (x: 2 = [3, 2], m: 2 bool = [1, 2], y: 2 = [3, 2]) => x.mask_where(m, y)),
        case!("mask_where", (x: 1 = [3], m: 1 bool = [1], y: 1 = [3]) => {
            x.prod_dim(0).mask_where(m, y.prod_dim(0))
        }),
        case!("mask_where", (i: 1 int(5) = [3], m: 1 bool = [3], j: 1 int(5) = [3]) => i.mask_where(m, j)),
        case!("mask_fill", (x: 2 = [3, 2], m: 2 bool = [3, 2]) => x.mask_fill(m, 1.5)),
        case!("mask_fill", (x: 2 = [3, 2], m: 2 bool = [1, 2]) => x.mask_fill(m, 0.0)),
        case!("mask_fill", (i: 2 int(5) = [3, 2], m: 2 bool = [3, 2]) => i.mask_fill(m, 7)),
        case!("clamp", (x: 2 = [3, 6]) => x.clamp(-1.0, 1.0)),
        case!("clamp", (i: 2 int(5) = [3, 2]) => i.clamp(1, 3)),
        case!("clamp_min", (x: 2 = [3, 6]) => x.clamp_min(-1.0)),
        case!("clamp_max", (x: 2 = [3, 6]) => x.clamp_max(1.0)),
    ]
}

fn likes() -> Vec<Case> {
    vec![
        case!("empty_like", (x: 2 = [3, 6]) => x.empty_like().zeros_like()),
        case!("zeros_like", (x: 2 = [3, 6]) => x.zeros_like()),
        case!("ones_like", (x: 2 = [3, 6]) => x.ones_like()),
        case!("full_like", (i: 2 int(5) = [3, 6]) => i.full_like(3)),
    ]
}
