//! Triangles of matrices.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("triu", (x: 2 = [3, 5]) => x.triu(0)),
        case!("triu", (x: 3 = [2, 5, 3]) => x.triu(-1)),
        case!("triu", (i: 2 int(9) = [3, 5]) => i.triu(1)),
        case!("tril", (x: 2 = [5, 3]) => x.tril(0)),
        case!("tril", (x: 3 = [2, 3, 6]) => x.tril(2)),
    ]
}
