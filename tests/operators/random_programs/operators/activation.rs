//! Activation functions.

use super::{Operator, operator, step};

macro_rules! pointwise {
    ($($name:literal => |$x:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [2 3], |d| {
            let $x = d.any::<D>();
            step!(($x: Float<D>) [] => $expr)
        })),*]
    };
}

macro_rules! along {
    ($($name:literal => |$x:ident, $dim:ident| $expr:expr;)*) => {
        vec![$(operator!($name, D in [2 3], |d| {
            let ($x, $dim) = (d.any::<D>(), d.below(D));
            step!(($x: Float<D>) [$dim] => $expr)
        })),*]
    };
}

pub fn operators() -> Vec<Operator> {
    let mut all = pointwise! {
        "relu" => |x| activation::relu(x);
        "relu6" => |x| activation::relu6(x);
        "leaky_relu" => |x| activation::leaky_relu(x, 0.1);
        "thresholded_relu" => |x| activation::thresholded_relu(x, 0.5);
        "threshold" => |x| activation::threshold(x, 0.5, -1.0);
        "sigmoid" => |x| activation::sigmoid(x);
        "log_sigmoid" => |x| activation::log_sigmoid(x);
        "hard_sigmoid" => |x| activation::hard_sigmoid(x, 0.2, 0.5);
        "tanh" => |x| activation::tanh(x);
        "tanhshrink" => |x| activation::tanhshrink(x);
        "hardtanh" => |x| activation::hardtanh(x, -1.0, 1.0);
        "softsign" => |x| activation::softsign(x);
        "softplus" => |x| activation::softplus(x, 2.0);
        "softplus_with_threshold" => |x| activation::softplus_with_threshold(x, 2.0, 3.0);
        "elu" => |x| activation::elu(x, 0.7);
        "celu" => |x| activation::celu(x, 0.7);
        "selu" => |x| activation::selu(x);
        "hard_shrink" => |x| activation::hard_shrink(x, 0.5);
        "soft_shrink" => |x| activation::soft_shrink(x, 0.5);
        "shrink" => |x| activation::shrink(x, 0.5, 0.2);
        "gelu" => |x| activation::gelu(x);
        "gelu_approximate" => |x| activation::gelu_approximate(x);
        "silu" => |x| activation::silu(x);
        "hard_swish" => |x| activation::hard_swish(x);
        "mish" => |x| activation::mish(x);
    };
    all.extend(along! {
        "softmax" => |x, dim| activation::softmax(x, dim);
        "log_softmax" => |x, dim| activation::log_softmax(x, dim);
        "softmin" => |x, dim| activation::softmin(x, dim);
        "quiet_softmax" => |x, dim| activation::quiet_softmax(x, dim);
    });
    all.extend([
        operator!("prelu", D in [2 3], |d| {
            let x = d.any::<D>();
            let channels = if d.chance(0.3) { 1 } else { d.shape::<D>(x)[1] };
            let alpha = d.floats([channels]);
            step!((x: Float<D>, alpha: Float<1>) [] => activation::prelu(x, alpha))
        }),
        operator!("glu", |d| {
            let dim = d.below(2);
            let mut shape = d.any_shape::<2>();
            shape[dim] = 2 * shape[dim].min(4);
            let x = d.floats(shape);
            step!((x: Float<2>) [dim] => activation::glu(x, dim))
        }),
    ]);
    all
}
