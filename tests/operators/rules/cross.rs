//! Products of vectors.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("cross", (a: 2 = [5, 3], b: 2 = [5, 3]) => a.cross(b, 1)),
        case!("cross", (a: 2 = [3, 2], b: 2 = [3, 2]) => a.cross(b, -2)),
        case!("dot", (a: 1 = [6], b: 1 = [6]) => a.dot(b)),
        case!("dot", (i: 1 int(5) = [3], j: 1 int(5) = [3]) => i.dot(j)),
    ]
}
