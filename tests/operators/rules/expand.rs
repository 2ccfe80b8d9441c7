//! Expansion and repetition.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("expand", (x: 2 = [3, 1]) => x.expand([2, 3, 4])),
        case!("expand", (x: 2 = [1, 3]) => x.expand([2, -1])),
        case!("expand", (m: 2 bool = [3, 1]) => m.expand([3, 2])),
        case!("repeat_dim", (x: 2 = [3, 2]) => x.repeat_dim(0, 2)),
        case!("repeat_dim", (i: 2 int(5) = [2, 3]) => i.repeat_dim(-2, 3)),
        case!("repeat", (x: 3 = [3, 2, 2]) => x.repeat(&[1, 2, 3])),
        case!("repeat", (m: 2 bool = [3, 2]) => m.repeat(&[1, 2])),
    ]
}
