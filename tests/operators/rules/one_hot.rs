//! One-hot encodings.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("one_hot", (i: 1 int(4) = [3]) => i.one_hot::<2>(4)),
        case!("one_hot_fill", (i: 2 int(4) = [3, 2]) => i.one_hot_fill::<3>(4, 5.0, -1.0, 1)),
        case!("one_hot_fill", (i: 2 int(4) = [3, 2]) => i.one_hot_fill::<3>(4, 2.0, 0.0, -1)),
    ]
}
