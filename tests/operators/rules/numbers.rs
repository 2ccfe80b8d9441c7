//! Numbers out of the ordinary: of few bits, negative, large, equal to each other.

use burn::tensor::{FloatDType, IndexingUpdateOp, IntDType};
use burn_dtensor::testing::prove::{Case, case};

use IndexingUpdateOp::{Add, Max, Min};

pub fn cases() -> Vec<Case> {
    [
        narrow_integers(),
        wide_integers(),
        half_floats(),
        tied(),
        meeting(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// They wrap around, and do not hold every length.
fn narrow_integers() -> Vec<Case> {
    vec![
        case!("embedding", (w: 2 = [256, 2], i: 2 int(256, U8) = [2, 3]) => module::embedding(w, i)),
        case!("embedding", (w: 2 = [5, 3], i: 2 int(5, I32) = [3, 2]) => module::embedding(w, i)),
        case!("gather", (x: 1 = [300], i: 1 int(256, U8) = [3]) => x.gather(0, i)),
        case!("select", (x: 1 int(-9..9, I8) = [200], i: 1 int(128, I8) = [3]) => x.select(0, i)),
        case!("take", (x: 1 = [300], i: 1 int(256, U8) = [3]) => x.take::<1, 1>(0, i)),
        case!("scatter", (x: 1 = [300], i: 1 int(256, U8) = [3], v: 1 = [3]) => x.scatter(0, i, v, Add)),
        case!("select_assign", (x: 1 = [300], i: 1 int(256, U16) = [3], v: 1 = [3]) => x.select_assign(0, i, v, Add)),
        case!("gather_nd", (x: 1 = [300], i: 2 int(256, U8) = [3, 1]) => x.gather_nd::<2, 1>(i)),
        case!("scatter_nd", (x: 1 = [300], i: 2 int(256, U8) = [3, 1], v: 1 = [3]) => x.scatter_nd(i, v, Add)),
        case!("one_hot", (i: 1 int(4, U8) = [3]) => i.one_hot::<2>(4)),
        case!("add", (i: 1 int(256, U8) = [3], j: 1 int(256, U8) = [3]) => i + j),
        case!("sub", (i: 2 int(256, U8) = [3, 2], j: 2 int(256, U8) = [3, 2]) => i - j),
        case!("sub", (i: 1 int(-127..128, I8) = [3], j: 1 int(-127..128, I8) = [3]) => i - j),
        case!("mul", (i: 1 int(256, U8) = [3], j: 1 int(256, U8) = [3]) => i * j),
        case!("add_scalar", (i: 2 int(256, U8) = [3, 2]) => i + 100),
        case!("sub_scalar", (i: 2 int(256, U8) = [3, 2]) => (i.clone() - 1, i.max_dim(1) - 1)),
        case!("mul_scalar", (i: 2 int(256, U8) = [3, 2]) => i * 3),
        case!("neg", (i: 2 int(256, U8) = [3, 2]) => -i),
        case!("neg", (i: 2 int(-127..128, I8) = [3, 2]) => -i),
        case!("div_scalar", (i: 2 int(256, U8) = [3, 2]) => i.div_scalar(3)),
        case!("max", (i: 2 int(256, U8) = [3, 2]) => i.max()),
        case!("min", (i: 2 int(-127..128, I8) = [3, 2]) => i.min()),
        case!("max_abs", (i: 2 int(-127..128, I8) = [3, 2]) => i.max_abs()),
        case!("clamp", (i: 2 int(256, U8) = [3, 2]) => i.clamp(20, 200)),
        case!("bitwise_not", (i: 2 int(256, U8) = [3, 2]) => i.bitwise_not()),
        case!("greater_scalar", (i: 2 int(256, U8) = [3, 2]) => i.greater_scalar(128)),
        case!("float", (i: 2 int(256, U8) = [3, 6]) => i.float()),
        case!("cast", (i: 2 int(256, U8) = [3, 2]) => (i.clone().cast(IntDType::I8), i.cast(FloatDType::F32))),
        case!("sort", (i: 2 int(256, U8) = [3, 5]) => i.sort(1)),
    ]
}

/// Negative, and more than single or half precision holds.
fn wide_integers() -> Vec<Case> {
    vec![
        case!("cast", (i: 2 int(-300..300) = [3, 2]) => i.cast(FloatDType::BF16)),
        case!("cast", (i: 2 int(-9_000_000_000_000..9_000_000_000_000) = [3, 2]) => i.cast(FloatDType::F32)),
        case!("cast", (i: 2 int(-300..300, I32) = [3, 2]) => (i.clone().cast(IntDType::U8), i.cast(FloatDType::F16))),
        case!("cast", (i: 2 int(-5..5) = [3, 2]) => (i.clone().cast(IntDType::I64), i.cast(IntDType::I32))),
        case!("float", (i: 2 int(-40_000_000..40_000_000) = [3, 2]) => i.float()),
        case!("sum", (i: 2 int(-9..9, I32) = [3, 2]) => i.sum()),
        case!("sum_dim", (i: 2 int(-9_000_000_000_000..9_000_000_000_000) = [3, 2]) => i.sum_dim(0)),
        case!("mean_dim", (i: 2 int(-9..9, I32) = [3, 2]) => i.mean_dim(0)),
        case!("prod", (i: 2 int(-4..5) = [3, 2]) => i.prod()),
        case!("cumsum", (i: 2 int(-9..9, I32) = [3, 2]) => i.cumsum(0)),
        case!("abs", (i: 2 int(-9..9) = [3, 2]) => i.abs()),
        case!("sign", (i: 2 int(-2..3) = [3, 2]) => i.sign()),
        case!("div", (i: 1 int(-9..9) = [3], j: 1 int(1..4) = [3]) => i / j),
        case!("remainder", (i: 1 int(-9..9) = [3], j: 1 int(1..4) = [3]) => i % j),
        case!("remainder_scalar", (i: 2 int(-9..9) = [3, 2]) => i % 4),
        case!("any", (i: 2 int(-1..2) = [3, 2]) => i.any()),
        case!("matmul", (i: 2 int(-9..9, I32) = [3, 2], j: 2 int(-9..9, I32) = [2, 3]) => i.matmul(j)),
        case!("max_pair", (i: 2 int(-9..9, I32) = [3, 2], j: 2 int(-9..9, I32) = [3, 2]) => i.max_pair(j)),
    ]
}

/// What they lose may differ from layout to layout, and no more.
fn half_floats() -> Vec<Case> {
    vec![
        case!("add", (a: 2 float(BF16) = [3, 2], b: 2 float(BF16) = [3, 1]) => a + b),
        case!("mul", (a: 2 float(F16) = [3, 2], b: 2 float(F16) = [3, 2]) => a * b),
        case!("exp", (x: 2 float(BF16) = [3, 6]) => x.exp()),
        case!("cast", (x: 2 float(BF16) = [3, 6]) => x.cast(FloatDType::F32)),
        case!("cast", (x: 2 float(F16) = [3, 2]) => x.cast(FloatDType::F64)),
        case!("cast", (x: 2 float(F16) = [3, 2]) => x.cast(FloatDType::BF16)),
        case!("cast", (x: 2 = [3, 2]) => x.cast(FloatDType::BF16)),
        case!("sum", (x: 2 float(BF16) = [3, 6]) => x.sum()),
        case!("mean_dim", (x: 2 float(BF16) = [3, 5]) => x.mean_dim(1)),
        case!("max_dim", (x: 2 float(F16) = [3, 5]) => x.max_dim(0)),
        case!("var", (x: 2 float(BF16) = [3, 5]) => x.var(1)),
        case!("matmul", (a: 2 float(BF16) = [3, 6], b: 2 float(BF16) = [6, 2]) => a.matmul(b)),
        case!("linear", (x: 2 float(F16) = [3, 4], w: 2 float(F16) = [4, 2]) => module::linear(x, w, None)),
        case!("embedding", (w: 2 float(BF16) = [6, 3], i: 2 int(6) = [2, 3]) => module::embedding(w, i)),
        case!("softmax", (x: 2 float(BF16) = [3, 6]) => activation::softmax(x, -1)),
        case!("layer_norm", (x: 2 float(BF16) = [3, 5], gamma: 1 float(BF16) = [5]) => {
            module::layer_norm(x, gamma, None, 1e-3)
        }),
        case!("attention", (x: 4 float(F16) = [1, 2, 3, 2]) => {
            module::attention(x.clone(), x.clone(), x, None, None, Default::default())
        }),
    ]
}

/// Of equal ones every layout finds the same.
fn tied() -> Vec<Case> {
    vec![
        case!("max", (x: 2 tied(3) = [3, 6]) => x.max()),
        case!("min_dim", (x: 2 tied(3) = [3, 6]) => x.min_dim(1)),
        case!("max_abs_dim", (x: 2 tied(3) = [3, 6]) => x.max_abs_dim(0)),
        case!("argmax", (x: 2 tied(3) = [3, 6]) => (x.clone().argmax(1), x.argmax(0))),
        case!("argmin", (x: 2 tied(3) = [3, 6]) => (x.clone().argmin(1), x.argmin(0))),
        case!("max_dim_with_indices", (x: 2 tied(3) = [3, 6]) => x.max_dim_with_indices(1)),
        case!("min_dim_with_indices", (i: 2 int(-1..2, I32) = [3, 6]) => i.min_dim_with_indices(0)),
        case!("sort", (x: 2 tied(3) = [3, 6]) => x.sort(1)),
        case!("sort_with_indices", (x: 2 tied(3) = [3, 6]) => x.sort_with_indices(1)),
        case!("argsort", (x: 2 tied(3) = [3, 6]) => (x.clone().argsort(1), x.argsort(0))),
        case!("topk_with_indices", (x: 2 tied(3) = [3, 6]) => x.topk_with_indices(4, 1)),
        case!("median", (x: 2 tied(3) = [3, 6]) => x.median(1)),
        case!("median_with_indices", (x: 2 tied(3) = [3, 6]) => x.median_with_indices(1)),
        case!("cummax", (x: 2 tied(3) = [3, 6]) => x.cummax(1)),
        case!("equal", (a: 2 tied(2) = [3, 6], b: 2 tied(2) = [3, 6]) => a.equal(b)),
        case!("sign", (x: 2 tied(3) = [3, 6]) => x.sign()),
        case!("relu", (x: 2 tied(3) = [3, 6]) => activation::relu(x)),
        case!("round", (x: 2 tied(5) = [3, 6]) => (x / 2.0).round()),
    ]
}

/// What an extremum leaves out gets no gradient, also where an operator makes it equal to the rest.
fn meeting() -> Vec<Case> {
    vec![
        case!("max_pair", (a: 2 meeting = [3, 6], b: 2 meeting = [3, 6]) => a.max_pair(b)),
        case!("max_pair", (a: 2 meeting = [3, 6], b: 2 meeting = [1, 6]) => a.max_pair(b)),
        case!("min_pair", (a: 2 meeting = [3, 6], b: 2 meeting = [3, 6]) => a.min_pair(b)),
        case!("min_pair", (a: 2 meeting = [3, 1], b: 2 meeting = [3, 6]) => a.min_pair(b)),
        case!("scatter", (x: 1 meeting = [7], i: 1 int(7) = [1], v: 1 meeting = [1]) => x.scatter(0, i, v, Max)),
        case!("scatter", (x: 1 meeting = [7], i: 1 int(7) = [1], v: 1 meeting = [1]) => x.scatter(0, i, v, Min)),
        case!("relu", (x: 2 meeting = [3, 6]) => activation::relu(x - 3.0)),
        case!("leaky_relu", (x: 2 meeting = [3, 6]) => activation::leaky_relu(x - 3.0, 0.5)),
    ]
}
