//! Concatenation.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("cat", (a: 2 = [3, 2], b: 2 = [3, 4]) => Tensor::cat(vec![a, b], 1)),
        case!("cat", (a: 1 = [3], b: 1 = [1], c: 1 = [2]) => Tensor::cat(vec![a, b, c], 0)),
        case!("cat", (m: 2 bool = [3, 2], n: 2 bool = [3, 1]) => Tensor::cat(vec![m, n], -1)),
        case!("stack", (a: 2 = [3, 2], b: 2 = [3, 2]) => Tensor::stack::<3>(vec![a, b], 1)),
        case!("stack", (i: 1 int(5) = [3], j: 1 int(5) = [3]) => Tensor::stack::<2>(vec![i, j], -1)),
    ]
}
