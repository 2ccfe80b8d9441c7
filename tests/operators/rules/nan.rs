//! NaN on one rank and a number on another, through every operator that lets partial extrema
//! through: what comes out is that of the whole. Operators of one table share a case.

use burn::tensor::IntDType;
use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("greater_scalar", (x: 1 nan = [4]) => x.greater_scalar(0.2)),
        case!("greater_equal_scalar", (x: 1 nan = [4]) => x.greater_equal_scalar(0.2)),
        case!("lower_scalar", (x: 1 nan = [4]) => x.lower_scalar(0.2)),
        case!("lower_equal_scalar", (x: 1 nan = [4]) => x.lower_equal_scalar(0.2)),
        case!("int", (x: 1 nan = [4]) => x.int()),
        case!("cast", (x: 1 nan = [4]) => x.cast(IntDType::I32)),
        case!("sign", (x: 1 nan = [4]) => x.sign()),
        case!("round", (x: 1 nan = [4]) => vec![x.clone().round(), x.clone().floor(), x.clone().ceil(), x.trunc()]),
        case!("tanh", (x: 1 nan = [4]) => vec![x.clone().tanh(), x.clone().erf(), x.clone().atan(), x.asinh()]),
        case!("exp", (x: 1 nan = [4]) => vec![x.clone().exp(), x.clone().log(), x.clone().sqrt(), x.neg()]),
        case!("clamp", (x: 1 nan = [4]) => x.clamp(-1.0, 1.0)),
        case!("clamp_min", (x: 1 nan = [4]) => x.clamp_min(-1.0)),
        case!("clamp_max", (x: 1 nan = [4]) => x.clamp_max(1.0)),
        case!("max_pair", (a: 1 nan = [4], b: 1 tied(3) = [4]) => a.max_pair(b)),
        case!("min_pair", (a: 1 nan = [4], b: 1 tied(3) = [4]) => a.min_pair(b)),
        case!("max", (x: 2 nan = [3, 2]) => vec![x.clone().max(), x.min()]),
        case!("cumsum", (x: 1 nan = [7]) => x.cumsum(0)),
        case!("cumprod", (x: 1 nan = [7]) => x.cumprod(0).detach()),
        case!("cummax", (x: 1 nan = [7]) => vec![x.clone().cummax(0).detach(), x.cummin(0).detach()]),
        case!("max_dim_with_indices", (x: 2 nan = [2, 7]) => x.max_dim_with_indices(1)),
        case!("min_dim_with_indices", (x: 2 nan = [2, 7]) => x.min_dim_with_indices(1)),
        case!("topk_with_indices", (x: 1 nan = [7]) => x.topk_with_indices(1, 0)),
        case!("softmax", (x: 2 nan = [2, 7]) => activation::softmax(x, 1).detach()),
        case!("relu", (x: 1 nan = [4]) => activation::relu(x)),
        case!("relu6", (x: 1 nan = [4]) => activation::relu6(x)),
        case!("leaky_relu", (x: 1 nan = [4]) => activation::leaky_relu(x, 0.1)),
        case!("thresholded_relu", (x: 1 nan = [4]) => activation::thresholded_relu(x, 0.5)),
        case!("threshold", (x: 1 nan = [4]) => activation::threshold(x, 0.5, -1.0)),
        case!("sigmoid", (x: 1 nan = [4]) => vec![activation::sigmoid(x.clone()), activation::log_sigmoid(x)]),
        case!("hard_sigmoid", (x: 1 nan = [4]) => activation::hard_sigmoid(x, 0.2, 0.5)),
        case!("tanhshrink", (x: 1 nan = [4]) => activation::tanhshrink(x)),
        case!("hardtanh", (x: 1 nan = [4]) => activation::hardtanh(x, -1.0, 1.0)),
        case!("softplus", (x: 1 nan = [4]) => activation::softplus(x, 1.0)),
        case!("hard_shrink", (x: 1 nan = [4]) => activation::hard_shrink(x, 0.5)),
        case!("soft_shrink", (x: 1 nan = [4]) => activation::soft_shrink(x, 0.5)),
        case!("shrink", (x: 1 nan = [4]) => activation::shrink(x, 0.5, 0.2)),
    ]
}
