//! Pointwise operators of one tensor.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("neg", (x: 2 = [3, 6]) => -x),
        case!("abs", (x: 2 = [3, 6]) => x.abs()),
        case!("abs", (i: 2 int(5) = [3, 2]) => i.abs()),
        case!("sign", (x: 2 = [3, 6]) => x.sign()),
        case!("add_scalar", (x: 2 = [3, 6]) => x + 1.5),
        case!("sub_scalar", (x: 2 = [3, 6]) => x - 1.5),
        case!("mul_scalar", (x: 2 = [3, 6]) => x * -1.5),
        case!("div_scalar", (x: 2 = [3, 6]) => x / -1.5),
        case!("div_scalar", (i: 2 int(9) = [3, 2]) => i.div_scalar(2)),
        case!("remainder_scalar", (x: 2 = [3, 6]) => x % 1.5),
        case!("powi_scalar", (x: 2 = [3, 6]) => x.powi_scalar(3)),
        case!("powf_scalar", (x: 2 positive = [3, 6]) => x.powf_scalar(1.5)),
        case!("exp", (x: 2 = [3, 6]) => x.exp()),
        case!("log", (x: 2 positive = [3, 6]) => x.log()),
        // What a partial maximum leaves out need not have a logarithm or a root.
        case!("log", (x: 2 = [3, 6]) => x.max_dim(1).log()),
        case!("sqrt", (x: 2 = [3, 6]) => x.max_dim(1).sqrt()),
        case!("log1p", (x: 2 positive = [3, 6]) => x.log1p()),
        case!("sqrt", (x: 2 positive = [3, 6]) => x.sqrt()),
        case!("square", (x: 2 = [3, 6]) => x.square()),
        case!("recip", (x: 2 positive = [3, 6]) => x.recip()),
        case!("erf", (x: 2 = [3, 6]) => x.erf()),
        case!("floor", (x: 2 = [3, 6]) => x.floor()),
        case!("ceil", (x: 2 = [3, 6]) => x.ceil()),
        case!("round", (x: 2 = [3, 6]) => x.round()),
        case!("trunc", (x: 2 = [3, 6]) => x.trunc()),
        case!("deg2rad", (x: 2 = [3, 6]) => x.deg2rad()),
        case!("rad2deg", (x: 2 = [3, 6]) => x.rad2deg()),
        case!("sin", (x: 2 = [3, 6]) => x.sin()),
        case!("cos", (x: 2 = [3, 6]) => x.cos()),
        case!("tan", (x: 2 within(-1.2..1.2) = [3, 6]) => x.tan()),
        case!("sinh", (x: 2 = [3, 6]) => x.sinh()),
        case!("cosh", (x: 2 = [3, 6]) => x.cosh()),
        case!("tanh", (x: 2 = [3, 6]) => x.tanh()),
        case!("asin", (x: 2 within(-0.9..0.9) = [3, 6]) => x.asin()),
        case!("acos", (x: 2 within(-0.9..0.9) = [3, 6]) => x.acos()),
        case!("atan", (x: 2 = [3, 6]) => x.atan()),
        case!("asinh", (x: 2 = [3, 6]) => x.asinh()),
        case!("acosh", (x: 2 within(1.2..3.0) = [3, 6]) => x.acosh()),
        case!("atanh", (x: 2 within(-0.9..0.9) = [3, 6]) => x.atanh()),
    ]
}
