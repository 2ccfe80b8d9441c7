//! Linear algebra.

use burn::linalg::Norm;

use super::{Operator, operator, step};

/// What burn has outside the graph alone.
pub mod plain {
    use burn::linalg;
    use burn::tensor::Tensor;

    pub fn svd(x: Tensor<3>) -> (Tensor<3>, Tensor<2>, Tensor<3>) {
        linalg::svd(x.without_autodiff(), 10)
    }
}

/// The same of DTensors.
pub mod sharded {
    use burn_dtensor::dtensor::DTensor;
    use burn_dtensor::dtensor::ops::linalg;

    pub fn svd(x: DTensor<3>) -> (DTensor<3>, DTensor<2>, DTensor<3>) {
        linalg::svd((x * 1.0).detach(), 10)
    }
}

macro_rules! norms_of_integers {
    ($($name:ident)+) => {
        [$(operator!(stringify!($name), |d| {
            let (i, dim) = (d.any_ints::<2>(), d.below(2));
            step!((i: Int<2>) [dim] => linalg::$name(i, dim))
        })),+]
    };
}

macro_rules! norms {
    ($($name:ident $name_dims:ident ($($p:expr)?);)*) => {
        vec![$(
            operator!(stringify!($name), |d| {
                let (x, dim) = (d.any::<2>(), d.below(2));
                step!((x: Float<2>) [dim] => linalg::$name(x, $($p,)? dim))
            }),
            operator!(stringify!($name_dims), |d| {
                let (x, dim) = (d.any::<3>(), d.below(3));
                step!((x: Float<3>) [dim] => linalg::$name_dims(x, $($p,)? &[dim, (dim + 1) % 3]))
            }),
        )*]
    };
}

pub fn operators() -> Vec<Operator> {
    let mut all = norms! {
        l0_norm l0_norm_dims ();
        l1_norm l1_norm_dims ();
        l2_norm l2_norm_dims ();
        max_abs_norm max_abs_norm_dims ();
        min_abs_norm min_abs_norm_dims ();
        lp_norm lp_norm_dims (3.0);
        vector_norm vector_norm_dims (Norm::L2);
    };
    all.extend(norms_of_integers!(l0_norm l1_norm max_abs_norm min_abs_norm));
    all.extend(of_vectors());
    all.extend(of_matrices());
    all
}

fn of_vectors() -> Vec<Operator> {
    vec![
        operator!("vector_normalize", |d| {
            let (x, dim) = (d.any::<2>(), d.below(2));
            step!((x: Float<2>) [dim] => linalg::vector_normalize(x, Norm::L1, dim, 0.5))
        }),
        operator!("cosine_similarity", |d| {
            let (x, dim) = (d.any::<2>(), d.below(2));
            let y = d.floats(d.shape::<2>(x));
            step!((x: Float<2>, y: Float<2>) [dim] => linalg::cosine_similarity(x, y, dim, Some(0.5)))
        }),
        operator!("outer", |d| {
            let (x, len) = (d.any::<2>(), 1 + d.below(4));
            let y = d.floats([d.shape::<2>(x)[0], len]);
            step!((x: Float<2>, y: Float<2>) [] => linalg::outer::<2, 3, Float>(x, y))
        }),
        operator!("outer", |d| {
            let i = d.any_ints::<1>();
            let j = d.any_ints::<1>();
            step!((i: Int<1>, j: Int<1>) [] => linalg::outer::<1, 2, Int>(i, j))
        }),
        operator!("outer_dim", |d| {
            let (x, len) = (d.any::<2>(), 1 + d.below(4));
            let y = d.floats([len, d.shape::<2>(x)[1]]);
            step!((x: Float<2>, y: Float<2>) [] => linalg::outer_dim::<2, 3, _, Float>(x, y, 0))
        }),
    ]
}

fn of_matrices() -> Vec<Operator> {
    vec![
        operator!("matvec", |d| {
            let x = d.any::<3>();
            let [batch, _, columns] = d.shape::<3>(x);
            let y = d.floats([batch, columns]);
            step!((x: Float<3>, y: Float<2>) [] => linalg::matvec::<3, 2, Float>(x, y))
        }),
        operator!("matvec", |d| {
            let i = d.any_ints::<2>();
            let j = d.ints([d.shape::<2>(i)[1]], 9);
            step!((i: Int<2>, j: Int<1>) [] => linalg::matvec::<2, 1, Int>(i, j))
        }),
        operator!("diag", |d| {
            let x = d.any::<3>();
            step!((x: Float<3>) [] => linalg::diag::<3, 2, Float>(x))
        }),
        operator!("diag", |d| {
            let i = d.any_ints::<2>();
            step!((i: Int<2>) [] => linalg::diag::<2, 1, Int>(i))
        }),
        operator!("trace", |d| {
            let x = d.any::<3>();
            step!((x: Float<3>) [] => linalg::trace::<3, 2>(x))
        }),
        operator!("lu", |d| {
            let shape = [d.len(), 1 + d.below(3), 1 + d.below(3)];
            let x = d.floats(shape);
            step!((x: Float<3>) [] => linalg::lu::<3, 2>(x))
        }),
        operator!("qr", |d| {
            let (shape, reduced) = ([d.len(), 1 + d.below(3), 1 + d.below(3)], d.chance(0.5));
            let x = d.floats(shape);
            step!((x: Float<3>) [reduced] => linalg::qr(x, reduced))
        }),
        operator!("svd", |d| {
            let shape = [d.len(), 1 + d.below(3), 1 + d.below(3)];
            let x = d.floats(shape);
            step!((x: Float<3>) [] => svd(x))
        }),
        operator!("det", |d| {
            let (batch, size) = (d.len(), 1 + d.below(4));
            let x = d.floats([batch, size, size]);
            step!((x: Float<3>) [] => linalg::det::<3, 2, 1>(x))
        }),
    ]
}
