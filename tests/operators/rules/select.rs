//! Selection by index and by mask.

use burn::tensor::IndexingUpdateOp::{Add, Assign, Max, Min, Mul};
use burn_dtensor::testing::prove::{Case, case};

/// Burn differentiates updates other than additions only where no slice is updated twice: one
/// index.
pub fn cases() -> Vec<Case> {
    vec![
        case!("select", (x: 2 = [5, 3], i: 1 int(5) = [3]) => x.select(0, i)),
        case!("select", (x: 3 = [2, 3, 3], i: 1 int(3) = [4]) => x.select(1, i)),
        case!("select", (x: 2 int(9) = [5, 3], i: 1 int(5) = [2]) => x.select(0, i)),
        case!("select_assign", (x: 2 = [3, 2], i: 1 int(3) = [3], v: 2 = [3, 2]) => x.select_assign(0, i, v, Add)),
        case!("select_assign", (x: 1 = [3], i: 1 int(3) = [1], v: 1 = [1]) => x.select_assign(0, i, v, Assign)),
        case!("select_assign", (x: 1 = [3], i: 1 int(3) = [1], v: 1 = [1]) => x.select_assign(0, i, v, Mul)),
        case!("select_assign", (x: 1 = [3], i: 1 int(3) = [1], v: 1 = [1]) => x.select_assign(0, i, v, Max)),
        case!("select_assign", (x: 1 = [3], i: 1 int(3) = [1], v: 1 = [1]) => x.select_assign(0, i, v, Min)),
        case!("take", (x: 2 = [5, 3], i: 2 int(5) = [2, 3]) => x.take::<2, 3>(0, i)),
        case!("take", (x: 2 = [3, 3], i: 2 int(3) = [4, 2]) => x.take::<2, 3>(-1, i)),
        case!("mask_select", (x: 2 = [3, 5], m: 2 bool = [3, 5]) => x.mask_select(m)),
        case!("argwhere", (m: 2 bool = [3, 6]) => m.argwhere()),
        case!("argwhere", (x: 1 = [3]) => x.greater_scalar(9.0).argwhere()),
        case!("nonzero", (m: 3 bool = [3, 1, 6]) => m.nonzero()),
        case!("nonzero", (x: 1 = [3]) => x.greater_scalar(9.0).nonzero()),
    ]
}
