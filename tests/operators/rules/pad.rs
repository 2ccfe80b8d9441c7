//! Padding.

use burn::tensor::ops::PadMode;
use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("pad", (x: 2 = [3, 2]) => x.pad([(1, 2)], PadMode::Constant(0.0))),
        case!("pad", (x: 2 = [3, 2]) => x.pad([(1, 0), (0, 0)], PadMode::Constant(1.5))),
        case!("pad", (x: 3 = [3, 3, 4]) => x.pad((1, 2, 1, 0), PadMode::Reflect)),
        case!("pad", (x: 2 = [3, 2]) => x.pad([(2, 1)], PadMode::Edge)),
        case!("pad", (i: 2 int(9) = [3, 2]) => i.pad([(1, 2)], PadMode::Constant(3.0))),
    ]
}
