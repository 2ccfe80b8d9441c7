//! Flips and rolls.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("flip", (x: 3 = [3, 2, 3]) => x.flip([0, -1])),
        case!("flip", (m: 2 bool = [3, 2]) => m.flip([1])),
        case!("roll_dim", (x: 2 = [3, 5]) => x.roll_dim(-2, 1)),
        case!("roll", (x: 3 = [3, 2, 5]) => x.roll(&[1, 2], &[1, 2])),
        case!("roll", (i: 2 int(9) = [5, 3]) => i.roll(&[2], &[0])),
    ]
}
