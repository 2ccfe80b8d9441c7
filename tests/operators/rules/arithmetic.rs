//! Arithmetic of two tensors.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("add", (a: 2 = [3, 2], b: 2 = [3, 2]) => a + b),
        case!("add", (a: 2 = [3, 1], b: 2 = [1, 5]) => a + b),
        case!("add", (i: 1 int(5) = [3], j: 1 int(5) = [3]) => i.add(j)),
        case!("sub", (a: 2 = [3, 2], b: 2 = [3, 2]) => a - b),
        case!("sub", (a: 2 = [5, 3], b: 2 = [1, 3]) => a.sub(b)),
        case!("mul", (a: 2 = [3, 2], b: 2 = [3, 2]) => a * b),
        case!("mul", (a: 2 = [3, 1], b: 2 = [3, 5]) => a.mul(b)),
        case!("mul", (i: 1 int(5) = [3], j: 1 int(5) = [3]) => i * j),
        case!("div", (a: 2 = [3, 2], b: 2 positive = [3, 2]) => a / b),
        case!("div", (a: 2 = [3, 2], b: 2 positive = [1, 2]) => a.div(b)),
        case!("div", (i: 1 int(9) = [3], j: 1 int(3) = [3]) => i / (j + 1)),
        case!("remainder", (a: 2 positive = [3, 2], b: 2 positive = [3, 2]) => a % b),
        case!("powi", (a: 2 positive = [3, 2], b: 2 = [3, 2]) => a.powi(b)),
        case!("powf", (a: 2 positive = [3, 2], b: 2 = [3, 2]) => a.powf(b)),
        case!("max_pair", (a: 2 = [3, 2], b: 2 = [3, 2]) => a.max_pair(b)),
        case!("max_pair", (a: 2 = [1, 3], b: 2 = [5, 3]) => a.max_pair(b)),
        case!("min_pair", (a: 2 = [3, 2], b: 2 = [3, 2]) => a.min_pair(b)),
        case!("min_pair", (a: 2 = [1, 3], b: 2 = [5, 3]) => a.min_pair(b)),
        case!("atan2", (a: 2 = [3, 2], b: 2 positive = [3, 2]) => a.atan2(b)),
        case!("fmod", (a: 2 = [3, 6], b: 2 within(0.3..0.9) = [3, 6]) => a.fmod(b)),
        case!("fmod", (a: 2 nan = [3, 6], b: 2 within(-0.9..-0.3) = [3, 6]) => a.fmod(b)),
        case!("hypot", (a: 2 = [3, 2], b: 2 = [3, 2]) => a.hypot(b)),
    ]
}
