//! Permutations of dimensions.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("permute", (x: 3 = [3, 2, 4]) => x.permute([2, 0, -2])),
        case!("permute", (m: 3 bool = [3, 2, 4]) => m.permute([1, 2, 0])),
        case!("swap_dims", (x: 3 = [3, 2, 4]) => x.swap_dims(0, -1)),
        case!("swap_dims", (i: 2 int(5) = [3, 2]) => i.swap_dims(0, 1)),
        case!("transpose", (x: 3 = [2, 3, 4]) => x.transpose()),
        case!("t", (x: 2 = [3, 2]) => x.t()),
        case!("movedim", (x: 3 = [3, 2, 4]) => x.movedim(0, 2)),
        case!("movedim", (x: 3 = [3, 2, 4]) => x.movedim(vec![0, 1], vec![-1, 0])),
    ]
}
