//! Views.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("reshape", (x: 2 = [4, 3]) => x.reshape([12])),
        case!("reshape", (x: 1 = [12]) => x.reshape([4, -1])),
        case!("reshape", (x: 3 = [2, 3, 4]) => x.reshape([6, 4])),
        case!("reshape", (x: 3 = [3, 1, 4]) => x.reshape([0, 4])),
        case!("reshape", (x: 2 = [4, 6]) => x.reshape([2, 3, 4])),
        case!("reshape", (x: 2 = [4, 6]) => x.reshape([8, 3])),
        case!("reshape", (i: 2 int(5) = [4, 3]) => i.reshape([12])),
        case!("reshape", (m: 2 bool = [4, 3]) => m.reshape([2, 6])),
        case!("flatten", (x: 3 = [3, 2, 2]) => x.flatten::<2>(1, -1)),
        case!("flatten", (x: 3 = [4, 1, 3]) => x.flatten::<2>(0, 1)),
        case!("unsqueeze", (x: 2 = [3, 2]) => x.unsqueeze::<4>()),
        case!("unsqueeze_dim", (x: 2 = [3, 2]) => x.unsqueeze_dim::<3>(-2)),
        case!("unsqueeze_dim", (m: 2 bool = [3, 2]) => m.unsqueeze_dim::<3>(0)),
        case!("unsqueeze_dims", (x: 2 = [3, 2]) => x.unsqueeze_dims::<5>(&[0, -1, -1])),
        case!("unsqueeze_dims", (x: 2 = [3, 2]) => x.unsqueeze_dims::<4>(&[1, 1])),
        case!("squeeze", (x: 4 = [1, 3, 1, 2]) => x.squeeze::<2>()),
        case!("squeeze_dim", (x: 3 = [3, 1, 2]) => x.squeeze_dim::<2>(1)),
        case!("squeeze_dims", (x: 4 = [1, 3, 1, 2]) => x.squeeze_dims::<3>(&[-2])),
        case!("squeeze_dims", (i: 4 int(4) = [1, 3, 1, 2]) => i.squeeze_dims::<2>(&[0, 2])),
        case!("unfold", (x: 2 = [3, 7]) => x.unfold::<3, _>(1, 3, 2)),
        case!("unfold", (x: 3 = [3, 2, 3]) => x.unfold::<4, _>(-3, 2, 1)),
        case!("unfold", (i: 2 int(9) = [3, 2]) => i.unfold::<3, _>(0, 2, 3)),
        case!("unfold", (m: 2 bool = [3, 2]) => m.unfold::<3, _>(1, 2, 1)),
    ]
}
