//! Matrix products.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("matmul", (a: 2 = [3, 6], b: 2 = [6, 2]) => a.matmul(b)),
        case!("matmul", (a: 2 = [5, 3], b: 2 = [3, 4]) => a.matmul(b)),
        case!("matmul", (a: 3 = [3, 2, 3], b: 3 = [3, 3, 2]) => a.matmul(b)),
        case!("matmul", (a: 3 = [1, 2, 3], b: 3 = [3, 3, 2]) => a.matmul(b)),
        case!("matmul", (i: 2 int(5) = [3, 2], j: 2 int(5) = [2, 3]) => i.matmul(j)),
    ]
}
