//! Gather and scatter, by one index and by tuples.

use burn::tensor::IndexingUpdateOp::{Add, Assign, Max, Min, Mul};
use burn_dtensor::testing::prove::{Case, case};

/// Burn differentiates updates other than additions only where no element is updated twice: one
/// index.
pub fn cases() -> Vec<Case> {
    vec![
        case!("gather", (x: 2 = [3, 5], i: 2 int(5) = [3, 2]) => x.gather(1, i)),
        case!("gather", (x: 2 = [6, 3], i: 2 int(6) = [3, 3]) => x.gather(0, i)),
        case!("gather", (x: 3 = [2, 3, 3], i: 3 int(3) = [2, 2, 3]) => x.gather(1, i)),
        case!("gather", (x: 2 int(9) = [3, 5], i: 2 int(5) = [3, 2]) => x.gather(-1, i)),
        case!("scatter", (x: 2 = [2, 3], i: 2 int(3) = [2, 3], v: 2 = [2, 3]) => x.scatter(1, i, v, Add)),
        case!("scatter", (x: 1 int(9) = [3], i: 1 int(3) = [3], v: 1 int(9) = [3]) => x.scatter(0, i, v, Add)),
        case!("scatter", (x: 1 = [3], i: 1 int(3) = [1], v: 1 = [1]) => x.scatter(0, i, v, Assign)),
        case!("scatter", (x: 1 = [3], i: 1 int(3) = [1], v: 1 = [1]) => x.scatter(0, i, v, Mul)),
        case!("scatter", (x: 1 = [3], i: 1 int(3) = [1], v: 1 = [1]) => x.scatter(0, i, v, Max)),
        case!("scatter", (x: 1 = [3], i: 1 int(3) = [1], v: 1 = [1]) => x.scatter(0, i, v, Min)),
        case!("gather_nd", (x: 3 = [3, 4, 2], i: 2 int(3) = [5, 2]) => x.gather_nd::<2, 2>(i)),
        case!("gather_nd", (x: 2 = [6, 3], i: 3 int(6) = [2, 3, 1]) => x.gather_nd::<3, 3>(i)),
        case!("gather_nd", (x: 2 int(9) = [3, 6], i: 2 int(3) = [3, 2]) => x.gather_nd::<2, 1>(i)),
        case!("scatter_nd", (x: 3 = [3, 2, 2], i: 2 int(2) = [3, 2], v: 2 = [3, 2]) => x.scatter_nd(i, v, Add)),
        case!("scatter_nd", (x: 2 = [3, 2], i: 3 int(3) = [2, 2, 1], v: 3 = [2, 2, 2]) => x.scatter_nd(i, v, Add)),
        case!("scatter_nd", (x: 2 int(9) = [3, 3], i: 2 int(3) = [3, 2], v: 1 int(9) = [3]) => x.scatter_nd(i, v, Add)),
        case!("scatter_nd", (x: 2 = [3, 6], i: 1 int(3) = [2], v: 1 = [1]) => {
            x.scatter_nd(i.unsqueeze::<2>(), v, Assign)
        }),
        case!("scatter_nd", (x: 2 = [3, 2], i: 1 int(3) = [1], v: 1 = [2]) => x.scatter_nd(i, v, Mul)),
        case!("scatter_nd", (x: 2 = [3, 2], i: 1 int(3) = [1], v: 1 = [2]) => x.scatter_nd(i, v, Max)),
        case!("scatter_nd", (x: 2 = [3, 2], i: 1 int(3) = [1], v: 1 = [2]) => x.scatter_nd(i, v, Min)),
    ]
}
