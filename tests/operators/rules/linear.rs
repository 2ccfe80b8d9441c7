//! Linear transformations.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("linear", (x: 2 = [3, 4], w: 2 = [4, 2]) => module::linear(x, w, None)),
        case!("linear", (x: 3 = [2, 3, 3], w: 2 = [3, 5]) => module::linear(x, w, None)),
        case!("linear", (x: 1 = [4], w: 2 = [4, 3]) => module::linear(x, w, None)),
        case!("linear", (x: 3 = [1, 3, 4], w: 2 = [4, 2], b: 1 = [2]) => module::linear(x, w, Some(b))),
    ]
}
