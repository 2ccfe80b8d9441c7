//! Splits.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("split", (x: 2 = [3, 5]) => x.split(2, 1)),
        case!("split", (m: 2 bool = [3, 5]) => m.split(3, -1)),
        case!("split_with_sizes", (x: 2 = [6, 3]) => x.split_with_sizes(vec![1, 0, 3, 2], 0)),
        case!("chunk", (x: 3 = [3, 2, 6]) => x.chunk(3, -1)),
        case!("chunk", (i: 2 int(9) = [3, 5]) => i.chunk(2, 1)),
        case!("chunk", (x: 2 = [3, 2]) => x.chunk(4, 1)),
        case!("iter_dim", (x: 2 = [3, 2]) => x.iter_dim(1).rev().collect::<Vec<_>>()),
    ]
}
