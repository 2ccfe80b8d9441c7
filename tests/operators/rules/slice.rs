//! Slices, and assignment to them.

use burn::tensor::s;
use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("slice", (x: 2 = [3, 4]) => x.slice([1..3, 0..4])),
        case!("slice", (x: 3 = [3, 5, 2]) => x.slice(s![.., 1..-1])),
        case!("slice", (x: 2 = [3, 5]) => x.slice(s![.., 0..5;2])),
        case!("slice", (x: 2 = [3, 5]) => x.slice(s![.., 0..5;-1])),
        case!("slice", (i: 2 int(9) = [3, 5]) => i.slice(s![-2.., ..])),
        case!("slice", (m: 2 bool = [3, 5]) => m.slice(s![.., 2])),
        case!("slice_dim", (x: 2 = [3, 5]) => x.slice_dim(-1, 1..4)),
        case!("narrow", (x: 2 = [5, 3]) => x.narrow(0, 1, 3)),
        case!("select_dim", (x: 3 = [3, 4, 2]) => x.select_dim::<2>(1, -1)),
        case!("select_dim", (x: 3 = [3, 4, 2]) => x.select_dim::<2>(0, 1)),
        case!("slice_assign", (x: 2 = [3, 5], v: 2 = [3, 2]) => x.slice_assign(s![.., 1..3], v)),
        case!("slice_assign", (x: 2 = [4, 3], v: 2 = [2, 3]) => x.slice_assign(s![0..4;2, ..], v)),
        case!("slice_assign", (i: 2 int(9) = [3, 5], j: 2 int(9) = [3, 2]) => i.slice_assign(s![.., 1..3], j)),
        case!("slice_assign", (m: 2 bool = [3, 5], n: 2 bool = [3, 2]) => m.slice_assign(s![.., 1..3], n)),
        case!("slice_fill", (x: 2 = [3, 5]) => x.slice_fill(s![.., 1..3], 0.0)),
        case!("slice_fill", (x: 2 = [3, 5]) => x.slice_fill(s![1..2, ..], 1.5)),
        case!("slice_fill", (i: 2 int(9) = [3, 5]) => i.slice_fill(s![.., 1..3], 7)),
    ]
}
