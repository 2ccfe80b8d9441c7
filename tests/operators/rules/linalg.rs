//! Linear algebra.

use burn::linalg::{self as plain, Norm};
use burn::tensor::Float;
use burn_dtensor::dtensor::ops::linalg;
use burn_dtensor::testing::prove::{Case, CaseInput, case};

pub fn cases() -> Vec<Case> {
    [norms(), products(), decompositions()]
        .into_iter()
        .flatten()
        .collect()
}

fn norms() -> Vec<Case> {
    vec![
        case!("l0_norm", (x: 2 = [3, 5]) => linalg::l0_norm(x.clamp_min(0.0), 1)),
        case!("l0_norm", (i: 2 int(3) = [3, 2]) => linalg::l0_norm(i, -1)),
        case!("l1_norm", (x: 2 = [3, 5]) => linalg::l1_norm(x, 1)),
        case!("l1_norm", (i: 2 int(-4..4) = [3, 2]) => linalg::l1_norm(i, 0)),
        case!("l2_norm", (x: 2 = [3, 5]) => linalg::l2_norm(x, 0)),
        case!("max_abs_norm", (x: 2 = [3, 5]) => linalg::max_abs_norm(x, 1)),
        case!("max_abs_norm", (i: 2 int(-9..4) = [3, 2]) => linalg::max_abs_norm(i, 1)),
        case!("min_abs_norm", (x: 2 = [3, 5]) => linalg::min_abs_norm(x, 1)),
        case!("min_abs_norm", (i: 2 int(-9..4) = [3, 2]) => linalg::min_abs_norm(i, 0)),
        case!("lp_norm", (x: 2 = [3, 5]) => linalg::lp_norm(x, 3.0, 1)),
        case!("lp_norm", (x: 2 = [3, 5]) => linalg::lp_norm(x, 4.0, 1)),
        case!("l0_norm_dims", (x: 3 = [3, 2, 3]) => linalg::l0_norm_dims(x.clamp_min(0.0), &[0, 2])),
        case!("l1_norm_dims", (x: 3 = [3, 2, 3]) => linalg::l1_norm_dims(x, &[0, 2])),
        case!("l2_norm_dims", (x: 3 = [3, 2, 3]) => linalg::l2_norm_dims(x, &[0, 1])),
        case!("max_abs_norm_dims", (x: 3 = [3, 2, 3]) => linalg::max_abs_norm_dims(x, &[0, 2])),
        case!("min_abs_norm_dims", (x: 3 = [3, 2, 3]) => linalg::min_abs_norm_dims(x, &[0, 2])),
        case!("lp_norm_dims", (x: 3 = [3, 2, 3]) => linalg::lp_norm_dims(x, 1.5, &[0, 2])),
        case!("vector_norm", (x: 2 = [3, 5]) => linalg::vector_norm(x, Norm::LInf, -1)),
        case!("vector_norm", (x: 2 = [3, 5]) => linalg::vector_norm(x, 2, 0)),
        case!("vector_norm_dims", (x: 3 = [3, 2, 3]) => linalg::vector_norm_dims(x, Norm::Lp(2.5), &[0, -1])),
        case!("vector_normalize", (x: 2 = [3, 5]) => linalg::vector_normalize(x, 2.0, 1, 0.1)),
        case!("vector_normalize", (x: 2 = [3, 2]) => linalg::vector_normalize(x, Norm::L1, 0, 9.0)),
        case!("cosine_similarity", (x: 2 = [3, 5], y: 2 = [3, 5]) => linalg::cosine_similarity(x, y, 1, None)),
        case!("cosine_similarity", (x: 2 = [3, 2], y: 2 = [1, 2]) => linalg::cosine_similarity(x, y, 0, Some(0.5))),
    ]
}

fn products() -> Vec<Case> {
    vec![
        case!("outer", (x: 2 = [3, 2], y: 2 = [3, 5]) => linalg::outer::<2, 3, Float>(x, y)),
        case!("outer", (i: 1 int(9) = [3], j: 1 int(9) = [2]) => linalg::outer::<1, 2, Int>(i, j)),
        case!("outer_dim", (x: 2 = [3, 2], y: 2 = [5, 2]) => linalg::outer_dim::<2, 3, _, Float>(x, y, 0)),
        case!("matvec", (x: 3 = [3, 2, 5], y: 2 = [3, 5]) => linalg::matvec::<3, 2, Float>(x, y)),
        case!("matvec", (i: 2 int(9) = [3, 6], j: 1 int(9) = [6]) => linalg::matvec::<2, 1, Int>(i, j)),
        case!("diag", (x: 3 = [3, 2, 5]) => linalg::diag::<3, 2, Float>(x)),
        case!("diag", (i: 2 int(9) = [3, 3]) => linalg::diag::<2, 1, Int>(i)),
        case!("trace", (x: 3 = [3, 5, 2]) => linalg::trace::<3, 2>(x)),
        case!("trace", (x: 2 = [3, 6]) => linalg::trace::<2, 1>(x)),
    ]
}

fn decompositions() -> Vec<Case> {
    vec![
        case!("lu", (x: 3 = [3, 3, 2]) => linalg::lu::<3, 2>(x)),
        case!("lu", (x: 2 = [2, 3]) => linalg::lu::<2, 1>(x)),
        case!("qr", (x: 3 = [3, 3, 2]) => linalg::qr(x, true)),
        case!("qr", (x: 4 = [3, 2, 2, 2]) => linalg::qr(x, false)),
        case!("qr", (x: 2 = [3, 2]) => linalg::qr(x, false)),
        singular_values::<3, 2>([3, 3, 2]),
        singular_values::<2, 1>([2, 3]),
        case!("det", (x: 3 = [3, 3, 3]) => linalg::det::<3, 2, 1>(x)),
        case!("det", (x: 4 = [3, 2, 4, 4]) => linalg::det::<4, 3, 2>(x)),
    ]
}

/// Of matrices outside the graph, of which alone burn has it.
fn singular_values<const D: usize, const D1: usize>(shape: [usize; D]) -> Case {
    Case::new(
        "svd",
        [CaseInput::float("x", shape)],
        |inputs| plain::svd::<D, D1>(inputs[0].tensor::<D, Float>().without_autodiff(), 10),
        |inputs| linalg::svd::<D, D1>((inputs[0].tensor::<D, Float>() * 1.0).detach(), 10),
    )
}
